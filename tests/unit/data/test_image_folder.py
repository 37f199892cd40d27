"""ImageNet's folders: which files, which crops, worker processes."""

import dataclasses
import math
import multiprocessing
import random
import shutil

import numpy as np
import pytest
import torch

from data_files import (
    NOISE_CLASSES,
    assert_same_batches,
    listing,
    write_image_folder,
    write_jpeg,
    write_noise,
    write_pixels,
)
from selectconv.errors import DataError, UsageError
from selectconv.lab.data import (
    Batching,
    ImageFolder,
    ImageSet,
    dataset_info,
    load_dataset,
    make_loader,
)
from selectconv.lab.data.read import image_folder
from selectconv.lab.data.read.image_file import centre_crop
from selectconv.lab.data.read.image_folder import read_imagenet
from selectconv.lab.data.registry import check_dataset_name, fetch_dataset, find_dataset

Image = pytest.importorskip("PIL.Image", reason="decoding needs Pillow (the train extra)")

INFO = dataset_info("imagenet")
SMALL = dataclasses.replace(INFO, shape=(3, 28, 28))
STEP = 2
# Of 1,000 draws of a fair coin: five standard deviations.
COIN = 5 * math.sqrt(0.25 / 1000)


@pytest.fixture
def folder(tmp_path):
    write_image_folder(tmp_path)
    return tmp_path


def test_lists_classes_and_files_in_order(folder):
    (folder / "train" / "n01" / "notes.txt").write_text("x")
    train, test = read_imagenet(folder, INFO)
    assert train.classes == ("n01", "n02")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [train.path(i).relative_to(folder).as_posix() for i in (0, 5)] == [
        "train/n01/n01_0.JPEG",
        "train/n02/n02_2.JPEG",
    ]
    assert test.labels.tolist() == [0, 1]
    part = train.take(torch.tensor([5, 0]))
    assert [part.path(i).name for i in range(2)] == ["n02_2.JPEG", "n01_0.JPEG"]
    assert part.labels.tolist() == [1, 0]


def test_an_image_as_in_a_test_and_as_in_training(folder):
    train, _ = read_imagenet(folder, INFO)
    for key in (4, (4, 123)):
        image, label = train[key]
        assert (image.shape, image.dtype, label) == ((3, 224, 224), torch.uint8, 1)
        assert abs(image.float().mean() - 140) <= STEP


def test_a_validation_set_may_lack_a_class_and_keeps_the_labels(folder):
    shutil.rmtree(folder / "val" / "n01")
    _, test = read_imagenet(folder, INFO)
    assert test.labels.tolist() == [1]
    assert test.path(0).name == "n02_0.JPEG"


def test_the_centre_crop_is_that_of_the_shorter_side_at_256(folder):
    # The horizontal position is written into the red channel: 500 wide, 375 high.
    ramp = np.zeros((375, 500, 3), dtype=np.uint8)
    ramp[..., 0] = np.linspace(0, 250, 500)[None]
    ramp[..., 1] = np.linspace(0, 250, 375)[:, None]
    Image.fromarray(ramp).save(folder / "val" / "n01" / "0.png")
    _, test = read_imagenet(folder, INFO)
    crop = test[0][0].permute(1, 2, 0).numpy().astype(float)
    # 341x256, so 58 columns and 16 rows fall away at each side.
    columns = (np.arange(224) + 0.5 + 58) / 341 * 250
    rows = (np.arange(224) + 0.5 + 16) / 256 * 250
    assert np.abs(crop[100, :, 0] - columns).max() < STEP
    assert np.abs(crop[:, 100, 1] - rows).max() < STEP


@pytest.mark.parametrize("size", [(300, 10), (10, 300), (1, 1), (256, 256)])
def test_crops_of_odd_images_have_the_right_size(size):
    image = Image.new("RGB", size)
    assert centre_crop(image, 224).size == (224, 224)
    assert image_folder._random_crop(image, 224, random.Random(0)).size == (224, 224)


def test_random_boxes_have_the_areas_and_ratios_of_the_common_scheme():
    draw = random.Random(0)
    areas, ratios, lefts = [], [], []
    for _ in range(1000):
        left, top, right, bottom = image_folder._random_box(400, 400, draw)
        assert 0 <= left < right <= 400 >= bottom > top >= 0
        areas.append((right - left) * (bottom - top) / 160_000)
        ratios.append((right - left) / (bottom - top))
        lefts.append(left / (400 - (right - left)) if right - left < 400 else 0.5)
    assert 0.07 < min(areas) < 0.1
    assert max(areas) > 0.9
    # Boxes of a large area that do not fit are drawn again: a little under the mean 0.54.
    assert 0.45 < sum(areas) / 1000 < 0.55
    assert 0.74 < min(ratios) < 0.77
    assert 1.30 < max(ratios) < 1.36
    assert abs(sum(ratio < 1 for ratio in ratios) / 1000 - 0.5) < COIN
    assert abs(sum(lefts) / 1000 - 0.5) < COIN


def test_a_very_long_image_gives_its_middle():
    assert image_folder._random_box(1000, 10, random.Random(0)) == (493, 0, 506, 10)
    assert image_folder._random_box(10, 1000, random.Random(0)) == (0, 493, 10, 506)


def test_half_of_the_training_images_are_mirrored():
    ramp = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    image = Image.fromarray(np.ascontiguousarray(ramp))
    mirrored = 0
    for seed in range(1000):
        crop = np.asarray(image_folder._random_crop(image, 8, random.Random(seed))).astype(int)
        mirrored += crop[0, 0, 0] > crop[0, -1, 0]
    assert abs(mirrored / 1000 - 0.5) < COIN


def batches(images, *, epoch=0, **options):
    batching = Batching(**{"batch_size": 4, "train": True, "seed": 3, "workers": 0, **options})
    return list(make_loader(images, SMALL, batching).epoch(epoch))


@pytest.fixture
def images(tmp_path):
    """Images with something to see in them."""
    write_noise(tmp_path, size=(40, 30), parts=(("train", 5), ("val", 5)))
    return read_imagenet(tmp_path, SMALL)


@pytest.mark.parametrize("method", ["fork", "spawn"])  # Linux's; that of macOS and Windows
def test_workers_serve_one_epoch_after_another(images, method):
    loader = make_loader(images[0], SMALL, Batching(4, train=True, seed=3, workers=2))
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    for epoch in (0, 1, 0) if method == "fork" else (0,):
        assert_same_batches(list(loader.epoch(epoch)), batches(images[0], epoch=epoch))
    multiprocessing.set_start_method(before, force=True)


def test_an_epoch_shows_every_image_once_in_another_order(images):
    orders = [torch.cat([labels for _, labels in batches(images[0], epoch=e)]) for e in (0, 1)]
    assert [order.bincount().tolist() for order in orders] == 2 * [[5, 5, 5]]
    assert not torch.equal(*orders)
    assert not torch.equal(batches(images[0])[0][0], batches(images[0], seed=4)[0][0])


def test_test_batches_are_the_centre_crops_in_order_normalised(images):
    test = images[1]
    found = torch.cat([batch for batch, _ in batches(test, train=False)])
    mean, std = torch.tensor(SMALL.mean).view(3, 1, 1), torch.tensor(SMALL.std).view(3, 1, 1)
    wanted = (torch.stack([test[row][0] for row in range(15)]).float() / 255 - mean) / std
    assert (found - wanted).abs().max() < 1e-5


def test_channels_last(images):
    batch, _ = batches(images[0], channels_last=True)[0]
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch, batches(images[0])[0][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_is_not_touched(images, workers):
    before = torch.get_rng_state()
    batches(images[0], workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named_in_one_line(images, workers):
    path = images[0].path(7)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=f"{path.name} cannot be decoded") as caught:
        batches(images[0], workers=workers)
    assert "\n" not in str(caught.value)


def flat_val(folder):
    shutil.rmtree(folder / "val")
    write_jpeg(folder / "val" / "ILSVRC2012_val_00000001.JPEG", 1)


def empty_val(folder):
    for path in (folder / "val").rglob("*.JPEG"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "train"), "train cannot be read: No such file"),
        (lambda folder: (folder / "train" / "n03").mkdir(), "n03 has no images"),
        (lambda folder: (folder / "val" / "n09").mkdir(), "val has the class 'n09'"),
        (flat_val, "val has no class folders: sort its images"),
        (empty_val, "val has no images"),
    ],
)
def test_wrong_folders_are_refused(folder, change, message):
    change(folder)
    before = listing(folder)
    with pytest.raises(DataError, match=message):
        read_imagenet(folder, INFO)
    assert listing(folder) == before


def test_too_many_classes_are_refused(folder):
    with pytest.raises(DataError, match="train has 2 class folders, wanted 1"):
        read_imagenet(folder, dataclasses.replace(INFO, num_classes=1))


# `imagefolder:DIR`: one's own images, their sizes and colours, and what is refused.


@pytest.fixture
def pets(tmp_path):
    write_noise(tmp_path / "pets")
    return tmp_path / "pets"


def test_what_is_known_about_a_folder_comes_from_its_listing(pets):
    info = dataset_info(f"imagefolder:{pets}")
    assert (info.classes, info.title, info.shape) == (NOISE_CLASSES, "pets", (3, 16, 16))
    assert (info.num_classes, info.num_train, info.num_test) == (3, 12, 6)
    assert (info.padding, info.flip) == (2, True)


def test_small_images_are_read_as_they_are_with_the_labels_of_their_folders(tmp_path):
    written = write_noise(tmp_path)
    splits = load_dataset(f"imagefolder:{tmp_path}")
    assert isinstance(splits.train, ImageSet)
    paths = [path for path in written if "train" in path.parts]
    for row, path in enumerate(paths):  # written class by class, in the order of the names
        assert torch.equal(splits.train.images[row].permute(1, 2, 0), torch.tensor(written[path]))
        assert NOISE_CLASSES[splits.train.labels[row]] == path.parent.name
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


def test_a_grayscale_file_among_colour_ones_is_turned_to_colour(pets):
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write_pixels(pets / "train" / "dog" / "1.png", gray)
    images = load_dataset(f"imagefolder:{pets}").train.images
    assert torch.equal(images[5], torch.tensor(gray).expand(3, 16, 16))
    assert load_dataset(f"imagefolder:{pets}", image_size=80).train[5][0].shape == (3, 80, 80)


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
    assert load_dataset(f"imagefolder:{tmp_path}").train.images.unique().tolist() == [200]


def test_a_relative_folder_is_relative_to_the_root_or_to_the_current_folder(pets, monkeypatch):
    monkeypatch.chdir(pets.parent)
    assert dataset_info("imagefolder:pets").num_train == 12
    monkeypatch.chdir("/")
    assert dataset_info("imagefolder:pets", root=pets.parent).num_train == 12
    assert len(load_dataset("imagefolder:pets", pets.parent).train) == 12
    assert find_dataset("imagefolder:pets", pets.parent) == pets
    assert fetch_dataset("imagefolder:pets", pets.parent) == pets
    with pytest.raises(UsageError, match="there is no folder pets/train"):
        find_dataset("imagefolder:pets")


def test_without_a_test_folder_there_are_no_test_images(pets):
    shutil.rmtree(pets / "test")
    splits = load_dataset(f"imagefolder:{pets}", subset=5)
    assert splits.test is None
    assert len(splits.train) == 5
    assert splits.info.num_test == 0
    for name, value in ("holdout", True), ("test_subset", 1):
        with pytest.raises(UsageError, match=f"`{name}` needs test images: .* no folder test"):
            load_dataset(f"imagefolder:{pets}", **{name: value})


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
def test_what_is_wrong_is_named_in_one_line(pets, gone, place, pixels, error, message):
    if gone is not None:
        shutil.rmtree(pets / gone)
    if pixels is None:
        (pets / place).mkdir()
    else:
        write_pixels(pets / place, pixels)
    with pytest.raises(error, match=message) as caught:
        load_dataset(f"imagefolder:{pets}")
    assert "\n" not in str(caught.value)


def test_a_damaged_image_is_named(pets):
    path = pets / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"cat/2\.png cannot be decoded"):
        load_dataset(f"imagefolder:{pets}")


def test_hidden_files_and_folders_are_passed_over(pets):
    (pets / "train" / ".ipynb_checkpoints").mkdir()
    (pets / "train" / "cat" / "._0.png").write_bytes(b"x")
    assert len(load_dataset(f"imagefolder:{pets}").train) == 12


@pytest.mark.parametrize("name", ["imagefolder:", "imagefolder: ", "imagefolder", "cifra10", 3])
def test_names_that_are_not_accepted(name):
    with pytest.raises(ValueError, match="imagefolder:DIR"):
        check_dataset_name(name)
