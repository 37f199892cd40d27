"""CIFAR-10 and CIFAR-100: the binary releases. The Python ones are pickles and never read."""

from pathlib import Path

import numpy as np
import torch

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, label_images

# Training files, and the test file at the end.
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR100_FILES = ("train.bin", "test.bin")


def read_cifar(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images; CIFAR-100's have their fine labels.

    Raises:
        DataError: a file is not what it should be.
    """
    files = CIFAR10_FILES if info.num_classes == 10 else CIFAR100_FILES
    *parts, test = (_read(folder / name, info) for name in files)
    shortest = min(range(len(parts)), key=lambda number: len(parts[number]))
    if len(parts[shortest]) < max(map(len, parts)):
        raise DataError(
            f"{folder / files[shortest]} is truncated: it has {len(parts[shortest]):,} images, "
            f"others {max(map(len, parts)):,}."
        )
    images = torch.cat([part.images for part in parts])
    return ImageSet(images, torch.cat([part.labels for part in parts])), test


def _read(path: Path, info: DatasetInfo) -> ImageSet:
    # A record: the label byte (CIFAR-100: coarse, fine), then the red, green and blue planes.
    num_labels = 1 if info.num_classes == 10 else 2
    record = num_labels + 3 * 32 * 32
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not len(content) or len(content) % record:
        raise DataError(
            f"{path} is truncated or not a {info.title} file: {len(content):,} bytes are not a "
            f"whole number of records of {record:,} bytes."
        )
    records = content.reshape(-1, record)
    images = records[:, num_labels:].reshape(-1, *info.shape)
    return label_images(images, records[:, num_labels - 1], info.num_classes, path)
