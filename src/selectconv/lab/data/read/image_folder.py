"""Image files in one folder per class: ImageNet, and your own images (`imagefolder:DIR`)."""

import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selectconv.errors import BadValue, DataError, UsageError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read.image_file import (
    as_tensor,
    centre_crop,
    decode_images,
    import_pillow,
    open_image,
)

PREFIX = "imagefolder:"
FILES = ("train", "val")
_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
# Training: a crop of this share of the area and this aspect ratio ("Going deeper", Szegedy et al.).
_SCALE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
# Test: the shorter side becomes 256 for a crop of 224.
_TEST_RESIZE = 256 / 224
_LARGEST = 224  # of your images, unless a training asks for more
_IN_MEMORY = 64  # up to this size your images are decoded once and kept
# ImageNet's, which pretrained networks expect. Grayscale: those of its luma, for channels that
# vary together.
_STATISTICS = {
    3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    1: ((0.459,), (0.226,)),
}

# An image's index and, in training, the seed of its own augmentation.
Key = int | tuple[int, int]


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Image files in one folder per class, decoded when asked for.

    `folder[i]` is image i as in a test: resized by its shorter side, centre crop. `folder[i, seed]`
    is image i as in training: a random part of random aspect ratio, resized, perhaps mirrored;
    `seed` alone decides, so the result does not depend on which worker makes it. Both are uint8
    (C, H, W) with the label.

    Attributes:
        root: the folder of the class folders.
        classes: names of the class folders, by label.
        names: file names inside the class folders, encoded; a million Python strings would be
            copied into every worker.
        labels: int64 (N,).
        size: height and width of the result.
        channels: 3 (colour) or 1 (grayscale).
    """

    root: Path
    classes: tuple[str, ...]
    names: np.ndarray
    labels: Tensor
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        index, seed = key if isinstance(key, tuple) else (key, None)
        image = open_image(self.path(index), self.channels)
        if seed is None:
            image = centre_crop(image, self.size, margin=_TEST_RESIZE)
        else:
            image = _random_crop(image, self.size, random.Random(seed))
        return as_tensor(image).contiguous(), int(self.labels[index])

    def path(self, index: int) -> Path:
        """Return the file of image `index`."""
        folder = self.classes[int(self.labels[index])]
        return self.root / folder / os.fsdecode(self.names[index])

    def take(self, index: Tensor) -> "ImageFolder":
        """Return the images at `index` (int64), in that order."""
        return replace(self, names=self.names[index.numpy()], labels=self.labels[index])


def list_splits(
    folder: Path, test_name: str, shape: tuple[int, int, int]
) -> tuple[ImageFolder, ImageFolder | None]:
    """List the images of `train` and of `test_name`, if that is there, with one folder per class.

    A label is the place of its class folder in the sorted names of `train`.

    Args:
        folder: has these folders.
        test_name: the folder of the test images, which need not show every class.
        shape: (C, H, W) of the images to serve.

    Raises:
        DataError: a folder is not what it should be.
    """
    train = _list_images(folder / "train", shape)
    if not (folder / test_name).is_dir():
        return train, None
    return train, _list_images(folder / test_name, shape, train.classes)


def _list_images(
    folder: Path, shape: tuple[int, int, int], known: tuple[str, ...] = ()
) -> ImageFolder:
    """List the images of the classes `known`; without these, of all, each of which needs one."""
    found = tuple(entry.name for entry in _scan(folder) if entry.is_dir())
    if not found:
        raise DataError(f"{folder} has no class folders: sort its images into one per class.")
    classes = known or found
    strange = set(found) - set(classes)
    if strange:
        raise DataError(f"{folder} has the class {min(strange)!r}, which train does not have.")
    files: list[bytes] = []
    counts = []
    for name in classes:
        entries = _scan(folder / name) if name in found else []
        here = [os.fsencode(e.name) for e in entries if e.name.lower().endswith(_SUFFIXES)]
        if not here and not known:
            raise DataError(f"{folder / name} has no images ({', '.join(_SUFFIXES)}).")
        files += here
        counts.append(len(here))
    if not files:
        raise DataError(f"{folder} has no images ({', '.join(_SUFFIXES)}).")
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
    return ImageFolder(folder, classes, np.array(files), labels, shape[1], shape[0])


def _scan(folder: Path) -> list["os.DirEntry[str]"]:
    """Return what is in a folder and not hidden, in the order of the names."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return sorted(entries, key=lambda entry: os.fsencode(entry.name))


def _random_crop(image: Any, size: int, draw: random.Random) -> Any:
    width, height = image.size
    box = _random_box(width, height, draw)
    result = image.crop(box).resize((size, size), resample=import_pillow().Resampling.BILINEAR)
    mirror = draw.random() < 0.5
    return result.transpose(import_pillow().Transpose.FLIP_LEFT_RIGHT) if mirror else result


def _random_box(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * draw.uniform(*_SCALE)
        ratio = math.exp(draw.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    # A very long image: its middle, as near to a square as the ratios allow.
    w = min(width, round(height * _RATIO[1]))
    h = min(height, round(width / _RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def read_imagenet(folder: Path, info: DatasetInfo) -> tuple[ImageFolder, ImageFolder | None]:
    """Return training and test images from a folder with `train` and `val`, one folder per class.

    Raises:
        DataError: a folder is missing or not what it should be.
    """
    train, test = list_splits(folder, "val", info.shape)
    if len(train.classes) > info.num_classes:
        raise DataError(
            f"{train.root} has {len(train.classes):,} class folders, wanted {info.num_classes:,}."
        )
    return train, test


def own_folder(name: str, root: Path | str | None = None) -> Path | None:
    """Return the folder that `imagefolder:DIR` names; None for other names.

    Args:
        name: of a data set.
        root: what a relative DIR is relative to; None: the current folder.

    Raises:
        ValueError: the name has no DIR.

    Example:
        >>> own_folder("imagefolder:photos", "data").as_posix()
        'data/photos'
    """
    if not name.startswith(PREFIX):
        return None
    given = name.removeprefix(PREFIX).strip()
    if not given:
        raise BadValue(
            f"`data` {PREFIX}DIR needs a folder, with train/ and test/ in it; got {name!r}."
        )
    return Path(root or "").expanduser() / Path(given).expanduser()


def describe_own_images(name: str, folder: Path, image_size: int | None) -> DatasetInfo:
    """Describe a folder of your images from its listing and its first training image.

    Args:
        name: what the user typed.
        folder: has `train`, and perhaps `test`.
        image_size: height and width. None: the shorter side of the first training image, at most
            224.

    Raises:
        UsageError: there is no such folder, it has no class folders, a class without images, or
            one in `test` that `train` does not have.
        DataError: the first image cannot be read.
    """
    if not (folder / "train").is_dir():
        raise UsageError(
            f"`data`: there is no folder {folder / 'train'} (--data-root says where to look); "
            f"{folder} must have train/ and test/, each with one folder of images per class."
        )
    try:
        train, test = list_splits(folder, "test", (3, 1, 1))
    except DataError as error:
        raise UsageError(f"`data`: {error}") from error
    first = open_image(train.path(0))
    size = image_size or min(*first.size, _LARGEST)
    channels = len(first.getbands())
    mean, std = _STATISTICS[channels]
    return DatasetInfo(
        name=name,
        title=folder.resolve().name,
        num_classes=len(train.classes),
        shape=(channels, size, size),
        num_train=len(train),
        num_test=0 if test is None else len(test),
        padding=size // 8 if size <= _IN_MEMORY else 0,
        flip=True,
        mean=mean,
        std=std,
        classes=train.classes,
    )


def read_own_images(
    folder: Path, info: DatasetInfo
) -> tuple[ImageSet | ImageFolder, ImageSet | ImageFolder | None]:
    """Return training and test images of a folder that was described; None: it has no `test`.

    Images of up to 64 pixels are decoded now, larger ones when they are needed.

    Raises:
        DataError: an image cannot be decoded; it is named.
    """
    train, test = list_splits(folder, "test", info.shape)
    if info.shape[1] > _IN_MEMORY:
        return train, test
    return _decode(train, info), None if test is None else _decode(test, info)


def _decode(images: ImageFolder, info: DatasetInfo) -> ImageSet:
    paths = [images.path(index) for index in range(len(images))]
    return ImageSet(decode_images(paths, info.shape, info.title), images.labels)
