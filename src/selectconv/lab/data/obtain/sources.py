"""Where data sets are published, and how to fetch them into a folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.obtain.archive import extract
from selectconv.lab.data.obtain.debian import unpack_package
from selectconv.lab.data.obtain.fetch import Download, download
from selectconv.lab.data.read import idx

_MEGABYTE = 1_000_000
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_TINY_IMAGENET = "http://cs231n.stanford.edu/"

# Checksums: the data sets' own pages (Fashion-MNIST's README, the CIFAR page); Tiny-ImageNet's page
# publishes none, it is the one that other readers of the archive agree on.
DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "fashion-mnist": tuple(
        Download(f"{_FASHION_MNIST}{name}.gz", md5, 30 * _MEGABYTE)
        for name, md5 in (
            ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310"),
        )
    ),
    "cifar10": (
        Download(
            f"{_CIFAR}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 200 * _MEGABYTE
        ),
    ),
    "cifar100": (
        Download(
            f"{_CIFAR}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 200 * _MEGABYTE
        ),
    ),
    "tiny-imagenet": (
        Download(
            f"{_TINY_IMAGENET}tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            300 * _MEGABYTE,
        ),
    ),
}


@dataclass(frozen=True)
class Archive:
    """A data set in one file.

    Attributes:
        name: the file's name.
        top: the only folder inside.
        max_bytes: the most it may unpack to.
    """

    name: str
    top: str
    max_bytes: int

    def unpack(self, path: Path, folder: Path) -> Path:
        """Unpack the file at `path` to `folder / top`."""
        return extract(path, folder, top=self.top, max_bytes=self.max_bytes)


ARCHIVES = {
    "cifar10": Archive("cifar-10-binary.tar.gz", "cifar-10-batches-bin", 200 * _MEGABYTE),
    "cifar100": Archive("cifar-100-binary.tar.gz", "cifar-100-binary", 200 * _MEGABYTE),
    "tiny-imagenet": Archive("tiny-imagenet-200.zip", "tiny-imagenet-200", 1000 * _MEGABYTE),
}


def fetch_into(info: DatasetInfo, folder: Path) -> Path:
    """Fetch a data set into `folder`: from the official host, or from Debian.

    Returns:
        The folder with the files, inside `folder`.

    Raises:
        DataError: it is not available; `folder` is as before.
    """
    if info.name not in DOWNLOADS:
        raise DataError(f"{info.title} cannot be fetched: its licence requires you to request it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror or error}.") from error
    if info.name == "fashion-mnist":
        return _fetch_fashion_mnist(info, folder)
    with _scratch(folder) as scratch:
        (source,) = DOWNLOADS[info.name]
        return ARCHIVES[info.name].unpack(download(source, scratch), folder)


def _fetch_fashion_mnist(info: DatasetInfo, folder: Path) -> Path:
    target = folder / info.name
    reasons = []
    for get in (_from_official_host, _from_debian):
        try:
            with _scratch(folder) as scratch:
                ready = scratch / info.name
                ready.mkdir()
                get(info, scratch, ready)
                try:
                    os.rename(ready, target)
                except OSError as error:
                    # Another process may have been faster.
                    if idx.locate(target, idx.FILES[0]) is None:
                        raise DataError(f"{target} cannot be created: {error.strerror}.") from error
            return target
        except DataError as error:
            reasons.append(str(error))
    raise DataError(" ".join(reasons))


def _from_official_host(info: DatasetInfo, scratch: Path, ready: Path) -> None:
    for source in DOWNLOADS[info.name]:
        download(source, ready)


def _from_debian(info: DatasetInfo, scratch: Path, ready: Path) -> None:
    files = unpack_package(scratch)
    for name in idx.FILES:
        path = idx.locate(files, name)
        if path is None:
            raise DataError(f"Debian's package has no {name}.")
        shutil.copyfile(path, ready / path.name)
    # Packed anew, so the published checksums do not apply: the content has to.
    train, test = idx.read_fashion_mnist(ready, info)
    std, mean = (float(value) / 255 for value in torch.std_mean(train.images.float(), correction=0))
    sizes = (len(train), len(test))
    if sizes != (info.num_train, info.num_test):
        raise DataError(f"Debian's package has {sizes} images: not {info.title} as published.")
    if max(abs(mean - info.mean[0]), abs(std - info.std[0])) > 5e-4:
        raise DataError(
            f"Debian's package has mean {mean:.4f}, std {std:.4f}: not {info.title} as published."
        )


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    # On the same file system as the result, so that it can be renamed into place.
    try:
        scratch = tempfile.TemporaryDirectory(
            dir=folder, prefix=".fetch.", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}.") from error
    with scratch as path:
        yield Path(path)
