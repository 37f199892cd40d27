"""Fashion-MNIST: IDX files, plain or gzipped, as distributed."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, label_images

# Each file may be plain or have ".gz" after its name.
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# MNIST has the same file names and shapes; its mean is 0.13 where Fashion-MNIST's is 0.29.
_MEAN_TOLERANCE = 0.01


def read_fashion_mnist(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images from a folder with the four files.

    Raises:
        DataError: a file is not what it should be, or belongs to another set.
    """
    train, test = (
        label_images(
            _read_idx(folder / images_name, most, *info.shape[1:])[:, None],
            _read_idx(folder / labels_name, most),
            info.num_classes,
            folder / labels_name,
        )
        for images_name, labels_name, most in (
            (*FILES[:2], info.num_train),
            (*FILES[2:], info.num_test),
        )
    )
    mean = float(train.images.numpy().mean()) / 255
    if len(train) == info.num_train and abs(mean - info.mean[0]) > _MEAN_TOLERANCE:
        raise DataError(
            f"{folder} does not hold {info.title}: its training images have mean {mean:.4f}, "
            f"wanted {info.mean[0]:.4f} (0.1307 would be MNIST, whose files have the same names)."
        )
    return train, test


def _read_idx(path: Path, most: int, *shape: int) -> np.ndarray:
    """Return an IDX file of at most `most` rows, each of bytes of this shape; plain or gzipped."""
    if not path.is_file():
        path = path.with_name(f"{path.name}.gz")
    row = math.prod(shape)
    start = 8 + 4 * len(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(start + most * row + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read; it is damaged or incomplete: {error}.") from error
    # IDX: two zero bytes, the type (8: unsigned byte), the number of dimensions, their sizes.
    count = int.from_bytes(content[4:8], "big")
    header = struct.pack(f">4B{1 + len(shape)}I", 0, 0, 8, 1 + len(shape), count, *shape)
    if content[:start] != header or count == 0 or len(content) != start + count * row:
        wanted = ", ".join(map(str, (f"up to {most:,}", *shape)))
        raise DataError(
            f"{path} is truncated, damaged or not an IDX file of ({wanted}) bytes: it has "
            f"{len(content):,} bytes and starts with {content[:start].hex(' ')}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(count, *shape)
