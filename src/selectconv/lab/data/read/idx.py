"""Fashion-MNIST: IDX files, plain or gzipped, as distributed."""

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, check_labels

# Each file may be plain or have ".gz" after its name.
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# IDX: two zero bytes, the type (8: unsigned byte), the number of dimensions.
_MAGIC = b"\x00\x00\x08"
_GZIP_MAGIC = b"\x1f\x8b"
# MNIST has the same file names and shapes; its mean is 0.13 where Fashion-MNIST's is 0.29.
_MEAN_TOLERANCE = 0.01


def locate(folder: Path, name: str) -> Path | None:
    """Return the file `name` of `folder`, plain or gzipped; None if it is missing."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read_idx(path: Path, limit: tuple[int, ...]) -> np.ndarray:
    """Return the bytes of an IDX file as an array with `len(limit)` dimensions.

    Args:
        path: the file; gzip is recognised by content.
        limit: the largest size accepted per dimension.

    Raises:
        DataError: the file is not such an IDX file, is larger than `limit`, truncated or damaged.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not zipped:
                return _read(raw, path, limit)
            with gzip.open(raw) as unzipped:
                return _read(cast(BinaryIO, unzipped), path, limit)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read; it is damaged or incomplete: {error}.") from error


def _read(stream: BinaryIO, path: Path, limit: tuple[int, ...]) -> np.ndarray:
    magic = _MAGIC + bytes([len(limit)])
    header = stream.read(4 + 4 * len(limit))
    if header[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of bytes in {len(limit)} dimensions: it starts with "
            f"{header[:4].hex(' ') or 'nothing'}, wanted {magic.hex(' ')}."
        )
    if len(header) < 4 + 4 * len(limit):
        raise DataError(f"{path} is truncated: it ends in the header.")
    shape = tuple(int(size) for size in np.frombuffer(header[4:], dtype=">u4"))
    # Before anything is read: a header may announce more than fits into memory.
    if any(size > most for size, most in zip(shape, limit, strict=True)):
        raise DataError(f"{path} announces shape {shape}, wanted at most {limit}.")
    size = math.prod(shape)
    body = stream.read(size + 1)
    if len(body) < size:
        raise DataError(
            f"{path} is truncated: shape {shape} needs {size:,} bytes, it has {len(body):,}."
        )
    if len(body) > size:
        raise DataError(f"{path} has more than the {size:,} bytes that shape {shape} needs.")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def read_fashion_mnist(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images from a folder with the four files.

    Raises:
        DataError: a file is missing, is not what it should be, or belongs to another set.
    """
    train = _read_split(folder, FILES[0], FILES[1], info, info.num_train)
    test = _read_split(folder, FILES[2], FILES[3], info, info.num_test)
    if len(train) == info.num_train:
        mean = float(train.images.numpy().mean()) / 255
        if abs(mean - info.mean[0]) > _MEAN_TOLERANCE:
            raise DataError(
                f"{folder} does not hold {info.title}: its training images have mean "
                f"{mean:.4f}, wanted {info.mean[0]:.4f} (0.1307 would be MNIST, whose files have "
                "the same names)."
            )
    return train, test


def _read_split(
    folder: Path, images_name: str, labels_name: str, info: DatasetInfo, most: int
) -> ImageSet:
    paths = [locate(folder, name) for name in (images_name, labels_name)]
    for path, name in zip(paths, (images_name, labels_name), strict=True):
        if path is None:
            raise DataError(f"{folder} has no {name}.gz.")
    images_path, labels_path = cast(list[Path], paths)
    _, height, width = info.shape
    images = read_idx(images_path, (most, height, width))
    if images.shape[1:] != (height, width) or len(images) == 0:
        raise DataError(
            f"{images_path} has images of shape {images.shape}, wanted (N, {height}, {width})."
        )
    labels = read_idx(labels_path, (most,))
    if len(labels) != len(images):
        raise DataError(
            f"{labels_path} has {len(labels):,} labels, {images_path.name} {len(images):,} images."
        )
    result = ImageSet(
        torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))
    )
    check_labels(result.labels, info.num_classes, labels_path)
    return result
