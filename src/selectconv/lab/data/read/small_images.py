"""Sets of small images, which are held in memory, as distributed."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, label_images
from selectconv.lab.data.read.image_file import decode_images

# Each file may be plain or have ".gz" after its name.
FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# MNIST has the same file names and shapes; its mean is 0.13 where Fashion-MNIST's is 0.29.
_MEAN_TOLERANCE = 0.01
# Training files, and the test file at the end.
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR100_FILES = ("train.bin", "test.bin")
TINY_IMAGENET_FILES = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")

Listing = list[tuple[Path, int]]


def read_digits(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return the 8x8 digits that ship with scikit-learn: no files, no network.

    They are in the order of the data set; the last 360 are the test set.

    Args:
        folder: not used; every reader takes one.
        info: the data set.

    Raises:
        DataError: scikit-learn is not installed.
    """
    bunch = import_extra("sklearn.datasets", "The digits data set", error=DataError).load_digits()
    # Pixels are 0 to 16.
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    split = info.num_train
    return ImageSet(images[:split], labels[:split]), ImageSet(images[split:], labels[split:])


def read_fashion_mnist(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images from a folder with the four IDX files.

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
            (*FASHION_MNIST_FILES[:2], info.num_train),
            (*FASHION_MNIST_FILES[2:], info.num_test),
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


def read_cifar(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images of CIFAR; CIFAR-100's have their fine labels.

    The files are those of the binary releases. The Python ones are pickles and never read.

    Raises:
        DataError: a file is not what it should be.
    """
    files = CIFAR10_FILES if info.num_classes == 10 else CIFAR100_FILES
    *parts, test = (_read_cifar(folder / name, info) for name in files)
    shortest = min(range(len(parts)), key=lambda number: len(parts[number]))
    if len(parts[shortest]) < max(map(len, parts)):
        raise DataError(
            f"{folder / files[shortest]} is truncated: it has {len(parts[shortest]):,} images, "
            f"others {max(map(len, parts)):,}."
        )
    images = torch.cat([part.images for part in parts])
    return ImageSet(images, torch.cat([part.labels for part in parts])), test


def _read_cifar(path: Path, info: DatasetInfo) -> ImageSet:
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


def read_tiny_imagenet(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and validation images from a `tiny-imagenet-200` folder.

    A label is the line of its class in `wnids.txt`. Training images come class by class, validation
    images in the order of `val_annotations.txt`, which says what they show.

    Raises:
        DataError: a file is missing or not what it should be.
    """
    try:
        train, test = _list_files(folder, info.num_classes)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder} cannot be read: {error}.") from error
    images = decode_images([path for path, _ in train + test], info.shape, info.title)
    labels = torch.tensor([label for _, label in train + test])
    split = len(train)
    return ImageSet(images[:split], labels[:split]), ImageSet(images[split:], labels[split:])


def _list_files(folder: Path, num_classes: int) -> tuple[Listing, Listing]:
    """List the files of the training images and of the validation images, with their labels."""
    names = (folder / "wnids.txt").read_text(encoding="utf-8").split()
    classes = {name: label for label, name in enumerate(names)}
    if not 0 < len(classes) == len(names) <= num_classes:
        raise DataError(
            f"{folder / 'wnids.txt'} names {len(names)} classes ({len(classes)} different ones), "
            f"wanted {num_classes}."
        )
    train: Listing = []
    for name, label in classes.items():
        images = folder / "train" / name / "images"
        train += [(images / file, label) for file in sorted(os.listdir(images))]
    annotations = folder / "val" / "val_annotations.txt"
    test: Listing = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        # File name, class, then the box around the object, which we do not use.
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in classes:
            raise DataError(
                f"{annotations}: wanted a file name, a tab and a class of wnids.txt, got "
                f"{line[:60]!r}."
            )
        test.append((folder / "val" / "images" / file, classes[name]))
    if not train or not test:
        raise DataError(f"{folder} has {len(train)} training and {len(test)} validation images.")
    return train, test
