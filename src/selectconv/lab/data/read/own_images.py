"""Your images: `imagefolder:DIR` with `train/` and `test/`, one folder per class in each."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selectconv.checks import check_count
from selectconv.errors import DataError, UsageError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.progress import progress_bar
from selectconv.lab.data.read.image_file import look_at, open_image
from selectconv.lab.data.read.image_folder import (
    ImageFolder,
    centre_crop,
    list_classes,
    list_images,
    list_test,
)

PREFIX = "imagefolder:"
TRAIN, TEST = "train", "test"
_LARGEST = 224  # of the images of a training, unless it is asked for more
_IN_MEMORY = 64  # up to this size the images are decoded once and kept
# ImageNet's, which pretrained networks expect. Grayscale: those of its luma, for channels that
# vary together.
_STATISTICS = {
    3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    1: ((0.459,), (0.226,)),
}


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
        raise ValueError(
            f"`data` {PREFIX}DIR needs a folder, with {TRAIN}/ and {TEST}/ in it; got {name!r}."
        )
    return Path(root or "").expanduser() / Path(given).expanduser()


def describe_images(name: str, folder: Path, image_size: int | None) -> DatasetInfo:
    """Describe a folder of images from its listing and the header of the first training image.

    Args:
        name: what the user typed.
        folder: has `train`, and perhaps `test`.
        image_size: height and width. None: the shorter side of the first training image, at most
            224.

    Raises:
        UsageError: there is no such folder, it has no class folders, a class without images, or
            one in `test` that `train` does not have.
        DataError: a folder or the first image cannot be read.
    """
    train_folder = folder / TRAIN
    if not train_folder.is_dir():
        problem = f"{folder} has no folder {TRAIN}"
        if not folder.is_dir():
            problem = f"there is no folder {folder} (--data-root says where to look)"
        raise UsageError(
            f"`data`: {problem}; it must be a folder with {TRAIN}/ and {TEST}/, each with one "
            "folder of images per class."
        )
    classes = list_classes(train_folder)
    if not classes:
        raise UsageError(
            f"`data`: {train_folder} has no class folders: sort its images into one folder per "
            "class."
        )
    train = list_images(train_folder, classes, (3, 1, 1), error=UsageError)
    channels, own_size = look_at(train.path(0))
    size = min(*own_size, _LARGEST)
    if image_size is not None:
        size = check_count("image_size", image_size, 1)
    shape = (channels, size, size)
    test = _list_test(folder, classes, shape)
    mean, std = _STATISTICS[channels]
    return DatasetInfo(
        name=name,
        title=folder.resolve().name,
        num_classes=len(classes),
        shape=shape,
        num_train=len(train),
        num_test=0 if test is None else len(test),
        padding=size // 8 if size <= _IN_MEMORY else 0,
        flip=True,
        mean=mean,
        std=std,
        classes=classes,
    )


def read_images(
    folder: Path, info: DatasetInfo
) -> tuple[ImageSet | ImageFolder, ImageSet | ImageFolder | None]:
    """Return training and test images of a folder that was described; None: it has no `test`.

    Images of up to 64 pixels are decoded now, larger ones when they are needed.

    Raises:
        DataError: images cannot be decoded; the first is named.
    """
    train = list_images(folder / TRAIN, info.classes, info.shape)
    test = _list_test(folder, info.classes, info.shape)
    if info.shape[1] > _IN_MEMORY:
        return train, test
    total = len(train) + (0 if test is None else len(test))
    with progress_bar(f"decoding {info.title}", total, of_bytes=False, stays=False) as advance:
        return _decode(train, advance), None if test is None else _decode(test, advance)


def _list_test(
    folder: Path, classes: tuple[str, ...], shape: tuple[int, int, int]
) -> ImageFolder | None:
    if not (folder / TEST).is_dir():
        return None
    return list_test(folder / TEST, classes, shape, error=UsageError)


def _decode(folder: ImageFolder, advance: Callable[[int], None]) -> ImageSet:
    """Decode all images of a folder: resize the shorter side, and crop the middle."""

    def decode(index: int) -> Tensor | DataError:
        try:
            image = open_image(folder.path(index), channels=folder.channels)
        except DataError as error:
            return error
        pixels = np.array(centre_crop(image, folder.size, margin=1.0))
        return torch.from_numpy(pixels).view(folder.size, folder.size, folder.channels)

    images = torch.empty(len(folder), folder.size, folder.size, folder.channels, dtype=torch.uint8)
    broken = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for row, decoded in enumerate(pool.map(decode, range(len(folder)))):
            if isinstance(decoded, DataError):
                broken.append(decoded)
            else:
                images[row] = decoded
            advance(1)
    if broken:
        others = f" (and {len(broken) - 1:,} more)" if len(broken) > 1 else ""
        raise DataError(f"{broken[0]}{others}") from broken[0]
    return ImageSet(images.permute(0, 3, 1, 2).contiguous(), folder.labels)
