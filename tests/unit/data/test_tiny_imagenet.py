"""Tiny-ImageNet as distributed: classes, annotations, decoding."""

import pytest
import torch

from data_files import TINY_CLASSES, listing, write_tiny_imagenet
from selectconv.errors import DataError
from selectconv.lab.data import dataset_info
from selectconv.lab.data.read.tiny_imagenet import read_tiny_imagenet

pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")

INFO = dataset_info("tiny-imagenet")
ANNOTATIONS = "val/val_annotations.txt"
# JPEG rounds.
STEP = 2


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    write_tiny_imagenet(folder)
    return folder


def greys(split):
    flat = split.images.flatten(1).int()
    assert (flat.max(1).values - flat.min(1).values).max() <= STEP
    return flat.float().mean(1).round().int().tolist()


def assert_near(values, wanted):
    assert len(values) == len(wanted)
    assert max(abs(a - b) for a, b in zip(values, wanted, strict=True)) <= STEP


def test_training_images_come_by_class_in_the_order_of_wnids(folder):
    train, _ = read_tiny_imagenet(folder, INFO)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    # Greys were dealt out in the order of TINY_CLASSES, which is not sorted.
    assert list(TINY_CLASSES) != sorted(TINY_CLASSES)
    assert_near(greys(train), [10, 20, 30, 40, 50, 60])
    assert train.images.shape == (6, 3, 64, 64)
    assert train.images.dtype == torch.uint8


def test_validation_images_follow_the_annotations(folder):
    _, test = read_tiny_imagenet(folder, INFO)
    # val_2: n01, val_0: n02, val_10: n03, val_1: n01; wnids.txt: n03, n01, n02.
    assert test.labels.tolist() == [1, 2, 0, 1]
    assert_near(greys(test), [70, 80, 90, 100])


def test_colours_stay_in_their_channels(folder):
    from PIL import Image

    path = folder / "val" / "images" / "val_2.JPEG"
    Image.new("RGB", (64, 64), (200, 100, 30)).save(path, quality=95)
    _, test = read_tiny_imagenet(folder, INFO)
    assert_near(test.images[0].float().mean((1, 2)).int().tolist(), [200, 100, 30])


IMAGE = "val/images/val_0.JPEG"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wnids.txt", None, "cannot be read: .*No such file.*wnids.txt"),
        (ANNOTATIONS, None, "cannot be read: .*No such file.*val_annotations.txt"),
        (IMAGE, None, "val_0.JPEG cannot be decoded: .*No such file"),
        ("wnids.txt", "", "names 0 classes"),
        ("wnids.txt", "n01\nn01\n", r"names 2 classes \(1 different"),
        ("wnids.txt", "".join(f"n{i}\n" for i in range(201)), "names 201 classes"),
        ("wnids.txt", "n01\nn02\nn99\n", "cannot be read: .*n99"),
        (ANNOTATIONS, "", "has 6 training and 0 validation images"),
        (ANNOTATIONS, "val_0.JPEG\tn77\t0\n", "annotations.txt: wanted a file name.*n77"),
        (ANNOTATIONS, "val_0.JPEG n01\n", "annotations.txt: wanted a file name, a tab"),
        (IMAGE, "", "val_0.JPEG cannot be decoded"),
        (IMAGE, "no image", "val_0.JPEG cannot be decoded"),
        (IMAGE, "truncated", "val_0.JPEG cannot be decoded: .*truncated"),
    ],
)
def test_wrong_files_are_refused_and_nothing_is_written(folder, name, text, message):
    content = (folder / name).read_bytes()[:-30]
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_bytes(content if text == "truncated" else text.encode())
    before = listing(folder)
    with pytest.raises(DataError, match=message):
        read_tiny_imagenet(folder, INFO)
    assert listing(folder) == before
