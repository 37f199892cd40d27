"""Tiny-ImageNet as distributed, decoded once and kept as one uint8 file."""

import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selectconv.errors import DataError
from selectconv.files import cache_folder, replacing
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, check_labels
from selectconv.lab.data.progress import progress_bar
from selectconv.lab.data.read.image_file import open_image

FILES = ("wnids.txt", "train", "val/val_annotations.txt", "val/images")
DECODED = "decoded.selectconv.safetensors"
_VERSION = "1"

_log = logging.getLogger(__name__)

Listing = list[tuple[Path, int]]


def read_tiny_imagenet(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and validation images from a `tiny-imagenet-200` folder.

    A label is the line of its class in `wnids.txt`. Training images come class by class, validation
    images in the order of `val_annotations.txt`, which says what they show. The decoded images are
    kept beside the originals, or in the cache where that folder cannot be written.

    Raises:
        DataError: a file is missing or not what it should be.
    """
    classes = _read_classes(folder / "wnids.txt", info.num_classes)
    train = _list_train(folder / "train", classes, info.num_train)
    test = _list_val(folder / "val", classes, info.num_test)
    key = _fingerprint(folder, train + test)
    places = [folder / DECODED, cache_folder() / f"tiny-imagenet-{key[:16]}.safetensors"]
    for place in places:
        kept = _load(place, key, info, (len(train), len(test)))
        if kept is not None:
            return kept
    with progress_bar(f"decoding {info.title}", len(train) + len(test), of_bytes=False) as advance:
        splits = []
        for listing in (train, test):
            images = torch.empty(len(listing), *info.shape, dtype=torch.uint8)
            for row, (path, _) in enumerate(listing):
                image = np.array(open_image(path, (info.shape[2], info.shape[1])))
                images[row] = torch.from_numpy(image).permute(2, 0, 1)
                advance(1)
            splits.append(ImageSet(images, torch.tensor([label for _, label in listing])))
    result = (splits[0], splits[1])
    for place in places:
        if _keep(place, key, result):
            break
    else:
        _log.warning("The decoded images could not be kept: the next start decodes them again.")
    return result


def _read_text(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}.") from error


def _read_classes(path: Path, num_classes: int) -> dict[str, int]:
    names = [line.strip() for line in _read_text(path) if line.strip()]
    if len(set(names)) != len(names) or not 0 < len(names) <= num_classes:
        raise DataError(
            f"{path} names {len(names)} classes ({len(set(names))} different ones), wanted "
            f"{num_classes}."
        )
    return {name: label for label, name in enumerate(names)}


def _list_train(folder: Path, classes: dict[str, int], most: int) -> Listing:
    result: Listing = []
    for name, label in classes.items():
        images = folder / name / "images"
        try:
            files = sorted(entry.name for entry in os.scandir(images) if entry.is_file())
        except OSError as error:
            raise DataError(f"{images} cannot be read: {error.strerror or error}.") from error
        if not files:
            raise DataError(f"{images} is empty.")
        result += [(images / file, label) for file in files]
    if len(result) > most:
        raise DataError(f"{folder} has {len(result):,} images, wanted at most {most:,}.")
    return result


def _list_val(folder: Path, classes: dict[str, int], most: int) -> Listing:
    annotations = folder / "val_annotations.txt"
    result: Listing = []
    seen: set[str] = set()
    for number, line in enumerate(_read_text(annotations), start=1):
        # File name, class, then the box around the object, which we do not use.
        fields = line.split("\t")
        if not line.strip():
            continue
        if len(fields) < 2 or fields[1] not in classes:
            raise DataError(
                f"{annotations}, line {number}: wanted a file name, a tab and a class of "
                f"wnids.txt, got {line[:60]!r}."
            )
        # A name with a path in it could point anywhere.
        if not fields[0] or Path(fields[0]).name != fields[0] or fields[0] in seen:
            raise DataError(f"{annotations}, line {number}: not a new file name: {fields[0]!r}.")
        seen.add(fields[0])
        result.append((folder / "images" / fields[0], classes[fields[1]]))
    if not 0 < len(result) <= most:
        raise DataError(f"{annotations} has {len(result):,} lines, wanted {most:,}.")
    return result


def _fingerprint(folder: Path, listing: Listing) -> str:
    # Which files, of which size and age, with which labels: enough to notice any change.
    digest = hashlib.sha256(_VERSION.encode())
    for path, label in listing:
        try:
            state = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
        line = f"{path.relative_to(folder)}\t{label}\t{state.st_size}\t{state.st_mtime_ns}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def _load(
    path: Path, key: str, info: DatasetInfo, sizes: tuple[int, int]
) -> tuple[ImageSet, ImageSet] | None:
    # None: there is nothing, or it is of other files, or it is damaged. It is then made anew.
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != key:
                return None
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        train = ImageSet(tensors["train_images"], tensors["train_labels"])
        test = ImageSet(tensors["test_images"], tensors["test_labels"])
        for images, size in ((train, sizes[0]), (test, sizes[1])):
            if images.images.shape != (size, *info.shape):
                return None
            check_labels(images.labels, info.num_classes, path)
    except (OSError, SafetensorError, KeyError, ValueError, DataError):
        return None
    return train, test


def _keep(path: Path, key: str, splits: tuple[ImageSet, ImageSet]) -> bool:
    train, test = splits
    tensors = {
        "train_images": train.images,
        "train_labels": train.labels,
        "test_images": test.images,
        "test_labels": test.labels,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as beside:
            save_file(tensors, beside, metadata={"key": key})
    except (OSError, SafetensorError) as error:
        _log.info("%s cannot be written: %s", path, error)
        return False
    return True
