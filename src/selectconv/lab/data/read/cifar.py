"""CIFAR-10 and CIFAR-100: the binary releases. The Python ones are pickles and never read."""

from pathlib import Path

import numpy as np
import torch

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, check_labels

CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR100_FILES = ("train.bin", "test.bin")
_NUM_COARSE = 20


def read_cifar10(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images from a `cifar-10-batches-bin` folder.

    Raises:
        DataError: a file is missing or not what it should be.
    """
    most = info.num_train // 5
    parts = [_read(folder / name, info, most, 1) for name in CIFAR10_FILES[:5]]
    sizes = {name: len(part) for name, part in zip(CIFAR10_FILES, parts, strict=False)}
    if max(sizes.values()) == most and min(sizes.values()) < most:
        short = min(sizes, key=lambda name: sizes[name])
        raise DataError(
            f"{folder / short} is truncated: it has {sizes[short]:,} images, others {most:,}."
        )
    train = ImageSet(
        torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    )
    return train, _read(folder / CIFAR10_FILES[5], info, info.num_test, 1)


def read_cifar100(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images, with their fine labels, from a `cifar-100-binary` folder.

    Raises:
        DataError: a file is missing or not what it should be.
    """
    train = _read(folder / CIFAR100_FILES[0], info, info.num_train, 2)
    return train, _read(folder / CIFAR100_FILES[1], info, info.num_test, 2)


def _read(path: Path, info: DatasetInfo, most: int, num_labels: int) -> ImageSet:
    # A record: the label bytes (CIFAR-100: coarse, fine), then the red, green and blue planes.
    channels, height, width = info.shape
    record = num_labels + channels * height * width
    try:
        size = path.stat().st_size
        if size > most * record:
            raise DataError(
                f"{path} has {size:,} bytes, wanted at most {most:,} records of {record:,}."
            )
        if size == 0 or size % record:
            raise DataError(
                f"{path} is truncated or not a {info.title} file: {size:,} bytes are not a whole "
                f"number of records of {record:,} bytes."
            )
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    records = torch.from_numpy(content).view(-1, record)
    labels = records[:, num_labels - 1].to(torch.int64)
    check_labels(labels, info.num_classes, path)
    if num_labels == 2:
        check_labels(records[:, 0].to(torch.int64), _NUM_COARSE, f"{path} (coarse labels)")
    images = records[:, num_labels:].reshape(-1, channels, height, width)
    return ImageSet(images.contiguous(), labels)
