"""Tiny-ImageNet as distributed."""

import os
from pathlib import Path

import torch

from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read.image_file import decode_images

FILES = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")

Listing = list[tuple[Path, int]]


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
