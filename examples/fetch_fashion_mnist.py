"""Fetch Fashion-MNIST from Debian's package into selectconv's cache; its own host may be far away.

    python examples/fetch_fashion_mnist.py

It needs apt, but neither root nor an installation: lists and package go to a temporary folder. apt
checks the package's signature, and selectconv the images when it reads them.
"""

import subprocess
import tempfile
from pathlib import Path

from selectconv.files import cache_folder

PACKAGE = "dataset-fashion-mnist"


def fetch() -> Path:
    """Fill the cache; the folder appears whole or not at all."""
    target = cache_folder() / "fashion-mnist"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for folder in ("lists/partial", "cache/archives/partial"):
            Path(scratch, folder).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", "Debug::NoLocking=1"]
        apt += ["-o", f"Dir::State::Lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache"]
        unpack = ["sh", "-c", "dpkg-deb -x *.deb unpacked"]
        for command in ([*apt, "update"], [*apt, "download", PACKAGE], unpack):
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=300)
        Path(scratch, "unpacked/usr/share/datasets/fashion-mnist").rename(target)
    return target


if __name__ == "__main__":
    print(fetch())
