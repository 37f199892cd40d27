"""`imagefolder:DIR`: one's own images, their sizes and colours, and what is refused."""

import shutil

import numpy as np
import pytest
import torch

from data_files import NOISE_CLASSES as CLASSES
from data_files import write_noise, write_pixels
from selectconv.errors import DataError, UsageError
from selectconv.lab.data import ImageFolder, ImageSet, dataset_info, load_dataset
from selectconv.lab.data.registry import check_dataset_name, fetch_dataset, find_dataset

pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")


@pytest.fixture
def folder(tmp_path):
    write_noise(tmp_path / "pets")
    return tmp_path / "pets"


def test_what_is_known_about_a_folder_comes_from_its_listing(folder):
    info = dataset_info(f"imagefolder:{folder}")
    assert (info.classes, info.title, info.shape) == (CLASSES, "pets", (3, 16, 16))
    assert (info.num_classes, info.num_train, info.num_test) == (3, 12, 6)
    assert (info.padding, info.flip) == (2, True)


def test_small_images_are_read_as_they_are_with_the_labels_of_their_folders(tmp_path):
    written = write_noise(tmp_path)
    splits = load_dataset(f"imagefolder:{tmp_path}")
    assert isinstance(splits.train, ImageSet)
    paths = [path for path in written if "train" in path.parts]
    for row, path in enumerate(paths):  # written class by class, in the order of the names
        assert torch.equal(splits.train.images[row].permute(1, 2, 0), torch.tensor(written[path]))
        assert CLASSES[splits.train.labels[row]] == path.parent.name
    assert len(splits.test) == 6


@pytest.mark.parametrize("size", [(16, 16), (100, 90)])
def test_grayscale_images_have_one_channel(tmp_path, size):
    written = write_noise(tmp_path, gray=True, size=size)
    splits = load_dataset(f"imagefolder:{tmp_path}")
    assert splits.info.shape == (1, size[1], size[1])
    assert len(splits.info.mean) == 1
    if size == (16, 16):
        assert torch.equal(splits.train.images[0, 0], torch.tensor(next(iter(written.values()))))
    else:
        assert splits.train[0][0].shape == splits.train[1, 3][0].shape == (1, 90, 90)


def test_a_grayscale_file_among_colour_ones_is_turned_to_colour(folder):
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write_pixels(folder / "train" / "dog" / "1.png", gray)
    images = load_dataset(f"imagefolder:{folder}").train.images
    assert torch.equal(images[5], torch.tensor(gray).expand(3, 16, 16))
    large = load_dataset(f"imagefolder:{folder}", image_size=80).train
    assert large[5][0].shape == (3, 80, 80)


def test_a_colour_file_among_grayscale_ones_is_named(tmp_path):
    write_noise(tmp_path, gray=True)
    write_pixels(tmp_path / "train" / "dog" / "1.png", np.zeros((16, 16, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"dog/1\.png is in colour, but the first"):
        load_dataset(f"imagefolder:{tmp_path}")


@pytest.mark.parametrize(
    ("size", "asked", "got"),
    [
        ((16, 16), None, 16),
        ((40, 30), None, 30),
        ((300, 500), None, 224),
        ((40, 30), 12, 12),
        ((20, 20), 48, 48),
        ((300, 500), 256, 256),
    ],
)
def test_the_size_is_the_one_asked_for_or_the_first_images(tmp_path, size, asked, got):
    write_noise(tmp_path, size=size, parts=(("train", 1), ("test", 1)))
    splits = load_dataset(f"imagefolder:{tmp_path}", image_size=asked)
    assert splits.info.shape == (3, got, got)
    if got <= 64:
        assert splits.train.images.shape == (3, 3, got, got)
    else:
        assert isinstance(splits.train, ImageFolder)
        assert splits.train[0][0].shape == splits.train[0, 7][0].shape == (3, got, got)


def test_the_middle_of_an_oblong_image_is_kept(tmp_path):
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200
    for part in ("train", "test"):
        write_pixels(tmp_path / part / "a" / "x.png", pixels)
    images = load_dataset(f"imagefolder:{tmp_path}").train.images
    assert images.unique().tolist() == [200]


def test_a_relative_folder_is_relative_to_the_root_or_to_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert dataset_info("imagefolder:pets").num_train == 12
    monkeypatch.chdir("/")
    assert dataset_info("imagefolder:pets", root=folder.parent).num_train == 12
    assert len(load_dataset("imagefolder:pets", folder.parent).train) == 12
    assert find_dataset("imagefolder:pets", folder.parent) == folder
    assert fetch_dataset("imagefolder:pets", folder.parent) == folder
    with pytest.raises(UsageError, match="there is no folder pets/train"):
        find_dataset("imagefolder:pets")


def test_without_a_test_folder_there_are_no_test_images(folder):
    shutil.rmtree(folder / "test")
    splits = load_dataset(f"imagefolder:{folder}", subset=5)
    assert splits.test is None
    assert len(splits.train) == 5
    assert splits.info.num_test == 0
    for options in ({"holdout": True}, {"test_subset": 1}):
        name = next(iter(options))
        with pytest.raises(UsageError, match=f"`{name}` needs test images: .* no folder test"):
            load_dataset(f"imagefolder:{folder}", **options)


NOTHING = np.zeros((4, 4), dtype=np.uint8)


@pytest.mark.parametrize(
    ("gone", "place", "pixels", "error", "message"),
    [
        ("", "", None, UsageError, "there is no folder .*pets/train .*pets must have train"),
        ("train", "train", None, UsageError, "train has no class folders"),
        (None, "train/bee", None, UsageError, "bee has no images"),
        (None, "test/bee/0.png", NOTHING, UsageError, "test has the class 'bee', which train does"),
        (
            None,
            "train/cat/2.png",
            NOTHING.astype(np.uint16),
            DataError,
            "2.png has more than 8 bits",
        ),
    ],
)
def test_what_is_wrong_is_named_in_one_line(folder, gone, place, pixels, error, message):
    if gone is not None:
        shutil.rmtree(folder / gone)
    if pixels is None:
        (folder / place).mkdir()
    else:
        write_pixels(folder / place, pixels)
    with pytest.raises(error, match=message) as caught:
        load_dataset(f"imagefolder:{folder}")
    assert "\n" not in str(caught.value)


def test_a_damaged_image_is_named(folder):
    path = folder / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"cat/2\.png cannot be decoded"):
        load_dataset(f"imagefolder:{folder}")


def test_hidden_files_and_folders_are_passed_over(folder):
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "train" / "cat" / "._0.png").write_bytes(b"x")
    assert len(load_dataset(f"imagefolder:{folder}").train) == 12


@pytest.mark.parametrize("name", ["imagefolder:", "imagefolder: ", "imagefolder", "cifra10", 3])
def test_names_that_are_not_accepted(name):
    with pytest.raises(ValueError, match="imagefolder:DIR"):
        check_dataset_name(name)
