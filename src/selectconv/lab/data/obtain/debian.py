"""Fashion-MNIST from Debian's package, unpacked without root and without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

from selectconv.errors import DataError
from selectconv.lab.data.progress import progress_bar

PACKAGE = "dataset-fashion-mnist"
_FOLDER_IN_PACKAGE = "usr/share/datasets/fashion-mnist"
_TIMEOUT_S = 300


def unpack_package(scratch: Path) -> Path:
    """Download and unpack the package inside the empty folder `scratch`.

    apt checks the package's signature; its own lists and cache are kept in `scratch`, so that no
    root is needed and the system stays as it is.

    Returns:
        The folder with the data files.

    Raises:
        DataError: this is not Debian, or the package is not available.
    """
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise DataError(
            f"Debian's {PACKAGE} is not available: there is no {' and no '.join(missing)}."
        )
    scratch = scratch.resolve()
    for folder in ("lists/partial", "cache/archives/partial", "unpacked"):
        (scratch / folder).mkdir(parents=True)
    apt = ["apt-get", "-q", "-o", f"Dir::State::Lists={scratch / 'lists'}"]
    apt += ["-o", f"Dir::Cache={scratch / 'cache'}", "-o", "Debug::NoLocking=1"]
    with progress_bar(f"Debian's {PACKAGE}", 3, of_bytes=False) as advance:
        _run([*apt, "update"], scratch)
        advance(1)
        _run([*apt, "download", PACKAGE], scratch)
        advance(1)
        packages = sorted(scratch.glob("*.deb"))
        if len(packages) != 1:
            raise DataError(
                f"Debian's {PACKAGE} is not available: apt-get left {len(packages)} packages."
            )
        _run(["dpkg-deb", "-x", str(packages[0]), str(scratch / "unpacked")], scratch)
        advance(1)
    result = scratch / "unpacked" / _FOLDER_IN_PACKAGE
    if not result.is_dir():
        raise DataError(f"Debian's {PACKAGE} has no folder {_FOLDER_IN_PACKAGE}.")
    return result


def _run(command: list[str], folder: Path) -> None:
    # LC_ALL: the messages we pass on are English, like the rest of the sentence.
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"Debian's {PACKAGE} is not available: {error}.") from error
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("E:")] or lines[-1:]
        reason = errors[0] if errors else f"exit code {result.returncode}"
        verb = " ".join(word for word in (command[0], command[-1]) if "/" not in word)
        raise DataError(f"Debian's {PACKAGE} is not available: {verb}: {reason}.")
