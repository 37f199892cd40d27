"""Tiny-ImageNet as distributed: classes, annotations, decoding once."""

import dataclasses
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_files import TINY_CLASSES, listing, write_jpeg, write_tiny_imagenet
from selectconv.errors import DataError
from selectconv.lab.data import dataset_info
from selectconv.lab.data.read import tiny_imagenet
from selectconv.lab.data.read.tiny_imagenet import DECODED, read_tiny_imagenet

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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "selectconv"


@pytest.fixture
def decodes(monkeypatch):
    """Counts the files that are decoded."""
    count, real = [], tiny_imagenet.open_image
    monkeypatch.setattr(
        tiny_imagenet, "open_image", lambda *args: (count.append(args[0]), real(*args))[1]
    )
    return count


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


def test_decoding_happens_once(folder, cache, decodes):
    first = read_tiny_imagenet(folder, INFO)
    assert len(decodes) == 10
    second = read_tiny_imagenet(folder, INFO)
    assert len(decodes) == 10
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
    assert (folder / DECODED).is_file()
    assert not cache.exists()
    assert not [name for name in listing(folder) if name.endswith(".part")]


@pytest.mark.parametrize("change", ["image", "annotation", "class order", "new image"])
def test_changed_files_are_decoded_again(folder, decodes, change):
    read_tiny_imagenet(folder, INFO)
    if change == "image":
        write_jpeg(folder / "val" / "images" / "val_0.JPEG", 222)
    elif change == "annotation":
        path = folder / ANNOTATIONS
        path.write_text(path.read_text().replace("val_0.JPEG\tn02", "val_0.JPEG\tn03"))
    elif change == "class order":
        (folder / "wnids.txt").write_text("n01\nn02\nn03\n")
    else:
        write_jpeg(folder / "train" / "n01" / "images" / "n01_7.JPEG", 222)
    decodes.clear()
    train, test = read_tiny_imagenet(folder, INFO)
    assert len(decodes) == len(train) + len(test)
    if change == "image":
        assert_near(greys(test)[1:2], [222])
    elif change == "annotation":
        assert test.labels.tolist() == [1, 0, 0, 1]
    elif change == "class order":
        assert test.labels.tolist() == [0, 1, 2, 0]
    else:
        assert len(train) == 7


@pytest.mark.parametrize("damage", ["truncated", "garbage", "other shape", "label", "no tensors"])
def test_a_damaged_decoded_file_is_made_anew(folder, decodes, damage):
    train, _ = read_tiny_imagenet(folder, INFO)
    path = folder / DECODED
    key = tiny_imagenet.safe_open(path, framework="pt").metadata()["key"]
    good = path.read_bytes()
    tensors = load_file(path)
    if damage == "truncated":
        path.write_bytes(good[:-100])
    elif damage == "garbage":
        path.write_bytes(b"nothing useful")
    elif damage == "other shape":
        tensors["train_images"] = tensors["train_images"][:, :, :32].contiguous()
        save_file(tensors, path, metadata={"key": key})
    elif damage == "label":
        tensors["test_labels"] = tensors["test_labels"] + 200
        save_file(tensors, path, metadata={"key": key})
    else:
        save_file({"other": torch.zeros(1)}, path, metadata={"key": key})
    decodes.clear()
    again, _ = read_tiny_imagenet(folder, INFO)
    assert len(decodes) == 10
    assert torch.equal(again.images, train.images)
    assert load_file(path)["train_images"].shape == (6, 3, 64, 64)


def test_the_decoded_images_go_to_the_cache_where_the_folder_is_read_only(
    folder, cache, decodes, monkeypatch
):
    real = tiny_imagenet.save_file

    def refuse_beside(tensors, path, metadata):
        if folder in path.parents:
            raise OSError(30, "Read-only file system")
        real(tensors, path, metadata)

    monkeypatch.setattr(tiny_imagenet, "save_file", refuse_beside)
    before = listing(folder)
    read_tiny_imagenet(folder, INFO)
    assert listing(folder) == before
    assert len(list(cache.iterdir())) == 1
    read_tiny_imagenet(folder, INFO)
    assert len(decodes) == 10


def test_a_full_disk_costs_the_next_start_only(folder, cache, monkeypatch, caplog):
    def refuse(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_imagenet, "save_file", refuse)
    before = listing(folder)
    train, _ = read_tiny_imagenet(folder, INFO)
    assert len(train) == 6
    assert listing(folder) == before
    assert listing(cache) == {}
    assert "could not be kept" in caplog.text


def remove(*parts):
    return lambda folder: (folder.joinpath(*parts)).unlink()


def write(text, *parts):
    return lambda folder: (folder.joinpath(*parts)).write_text(text)


def jpeg(*parts, cut=None, size=(64, 64)):
    def change(folder):
        path = folder.joinpath(*parts)
        write_jpeg(path, 90, size=size)
        if cut is not None:
            path.write_bytes(path.read_bytes()[:cut])

    return change


def empty_class(folder):
    for path in (folder / "train" / "n01" / "images").iterdir():
        path.unlink()


def no_class(folder):
    os.rename(folder / "train" / "n01", folder / "train" / "n09")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("wnids.txt"), "wnids.txt cannot be read: No such file"),
        (remove(ANNOTATIONS), "val_annotations.txt cannot be read: No such file"),
        (remove("val", "images", "val_10.JPEG"), "val_10.JPEG cannot be read: No such file"),
        (write("", "wnids.txt"), r"names 0 classes"),
        (write("n01\nn01\n", "wnids.txt"), r"names 2 classes \(1 different"),
        (write("".join(f"n{i}\n" for i in range(201)), "wnids.txt"), "names 201 classes"),
        (write("", ANNOTATIONS), "has 0 lines, wanted 10,000"),
        (write("val_0.JPEG\tn77\t0\n", ANNOTATIONS), "line 1: wanted a file name.*n77"),
        (write("val_0.JPEG n01\n", ANNOTATIONS), "line 1: wanted a file name, a tab"),
        (
            write("../images/val_0.JPEG\tn01\n", ANNOTATIONS),
            "line 1: not a new file name: '../images",
        ),
        (write("/etc/passwd\tn01\n", ANNOTATIONS), "line 1: not a new file name: '/etc/passwd'"),
        (write("val_0.JPEG\tn01\n" * 2, ANNOTATIONS), "line 2: not a new file name: 'val_0.JPEG'"),
        (write("", "val", "images", "val_0.JPEG"), "val_0.JPEG cannot be decoded"),
        (write("no image", "val", "images", "val_0.JPEG"), "val_0.JPEG cannot be decoded"),
        (jpeg("val", "images", "val_0.JPEG", cut=-30), "val_0.JPEG cannot be decoded: .*truncated"),
        (jpeg("val", "images", "val_0.JPEG", size=(64, 63)), "has 64x63 pixels, wanted 64x64"),
        (empty_class, "n01.images is empty"),
        (no_class, "n01.images cannot be read: No such file"),
    ],
)
def test_wrong_files_are_refused_and_nothing_is_written(folder, cache, change, message):
    change(folder)
    before = listing(folder)
    with pytest.raises(DataError, match=message):
        read_tiny_imagenet(folder, INFO)
    assert listing(folder) == before
    assert not cache.exists()


def test_more_images_than_the_set_has_are_refused(folder):
    with pytest.raises(DataError, match="train has 6 images, wanted at most 5"):
        read_tiny_imagenet(folder, dataclasses.replace(INFO, num_train=5))
    with pytest.raises(DataError, match="has 4 lines, wanted 3"):
        read_tiny_imagenet(folder, dataclasses.replace(INFO, num_test=3))
