"""Image files in one folder per class (ImageNet, or your own), and their crops."""

import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from selectconv.errors import DataError, SelectConvError
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.read.image_file import import_pillow, open_image

FILES = ("train", "val")
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
# Training: a crop of this share of the area and this aspect ratio ("Going deeper", Szegedy et al.).
_SCALE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
# Test: the shorter side becomes 256 for a crop of 224.
_TEST_RESIZE = 256 / 224

# An image's index and, in training, the seed of its own augmentation.
Key = int | tuple[int, int]


@dataclass(frozen=True, eq=False)
class ImageFolder(Dataset[tuple[Tensor, int]]):
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
    channels: int = 3

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        index, seed = key if isinstance(key, tuple) else (key, None)
        image = open_image(self.path(index), channels=self.channels)
        if seed is None:
            image = centre_crop(image, self.size)
        else:
            image = _random_crop(image, self.size, random.Random(seed))
        pixels = torch.from_numpy(np.array(image)).view(self.size, self.size, self.channels)
        return pixels.permute(2, 0, 1).contiguous(), int(self.labels[index])

    def path(self, index: int) -> Path:
        """Return the file of image `index`."""
        folder = self.classes[int(self.labels[index])]
        return self.root / folder / os.fsdecode(self.names[index])

    def take(self, index: Tensor) -> "ImageFolder":
        """Return the images at `index` (int64), in that order."""
        return replace(self, names=self.names[index.numpy()], labels=self.labels[index])


def read_image_folder(folder: Path, info: DatasetInfo) -> tuple[ImageFolder, ImageFolder]:
    """Return training and test images from a folder with `train` and `val`, one folder per class.

    A label is the place of its class folder in the sorted names of `train`.

    Raises:
        DataError: a folder is missing or not what it should be.
    """
    classes = list_classes(folder / "train")
    if not 0 < len(classes) <= info.num_classes:
        raise DataError(
            f"{folder / 'train'} has {len(classes):,} class folders, wanted {info.num_classes:,}."
        )
    train = list_images(folder / "train", classes, info.shape)
    return train, list_test(folder / "val", classes, info.shape)


def list_test(
    folder: Path,
    classes: tuple[str, ...],
    shape: tuple[int, int, int],
    *,
    error: type[SelectConvError] = DataError,
) -> ImageFolder:
    """Return the images of a folder whose classes must be among those of training.

    Raises:
        SelectConvError: of the class `error`: it has no class folders, or one that training does
            not have.
    """
    found = list_classes(folder)
    if not found:
        raise error(
            f"{folder} has no class folders: sort its images into one folder per class, "
            "named as in train."
        )
    strange = sorted(set(found) - set(classes))
    if strange:
        raise error(f"{folder} has the class {strange[0]!r}, which train does not have.")
    return list_images(folder, classes, shape, error=error)


def list_classes(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders; hidden folders do not count.

    Raises:
        DataError: the folder cannot be read.
    """
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return tuple(sorted(name for name in found if not name.startswith(".")))


def list_images(
    folder: Path,
    classes: tuple[str, ...],
    shape: tuple[int, int, int],
    *,
    error: type[SelectConvError] = DataError,
) -> ImageFolder:
    """Return the images of some class folders, as (C, H, W) of `shape`.

    Raises:
        SelectConvError: of the class `error`: there are no images.
        DataError: a folder cannot be read.
    """
    names: list[bytes] = []
    counts: list[int] = []
    for name in classes:
        try:
            found = sorted(
                os.fsencode(entry.name)
                for entry in os.scandir(folder / name)
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
            )
        except FileNotFoundError:
            found = []  # a part of `val` need not show every class
        except OSError as problem:
            raise DataError(
                f"{folder / name} cannot be read: {problem.strerror or problem}."
            ) from problem
        names += found
        counts.append(len(found))
    if folder.name == "train" and not all(counts):
        empty = classes[counts.index(0)]
        raise error(f"{folder / empty} has no images ({', '.join(SUFFIXES)}).")
    if not names:
        raise error(f"{folder} has no images ({', '.join(SUFFIXES)}).")
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
    return ImageFolder(folder, classes, np.array(names), labels, shape[1], shape[0])


def centre_crop(image: Any, size: int, *, margin: float = _TEST_RESIZE) -> Any:
    """Return the middle of an image whose shorter side was resized to `margin * size`."""
    shorter = round(size * margin)
    width, height = image.size
    # The longer side is rounded down, as in the common code: 500x375 becomes 341x256.
    new = tuple(shorter * side // min(width, height) for side in (width, height))
    left, top = (round((side - size) / 2) for side in new)
    resized = image.resize(new, resample=import_pillow().Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


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
