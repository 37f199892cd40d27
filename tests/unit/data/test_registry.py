"""Where data sets are looked for, fetching, and what is said when they are not available."""

import hashlib
import io
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_files import (
    archive_folder,
    listing,
    write_cifar10,
    write_cifar100,
    write_fashion_mnist,
    write_image_folder,
    write_tar,
    write_tiny_imagenet,
)
from selectconv.errors import DataError
from selectconv.lab.data import (
    dataset_info,
    fetch_dataset,
    find_dataset,
    load_dataset,
    registry,
)
from selectconv.lab.data.catalogue import ENTRIES
from selectconv.lab.data.read import small_images
from selectconv.lab.data.registry import check_present

SYSTEM_FOLDER = registry.SYSTEM_FOLDER  # every test has another one


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """The three known places, empty; no network."""
    result = {name: tmp_path / name for name in ("given", "system", "cache")}
    for path in result.values():
        path.mkdir()
    monkeypatch.setenv("SELECTCONV_DATA", str(result["given"]))
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", result["system"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(result["cache"]))
    result["cache"] /= "selectconv"

    def no_network(request, timeout):
        raise AssertionError(f"a test reached for {request.full_url}")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    return result


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The folder whose files the network has; HTTP itself is tested in test_obtain.py."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Answer(io.BytesIO):
        length = None

    def answer(request, timeout):
        path = folder / request.full_url.rpartition("/")[2]
        if not path.exists():
            raise OSError(f"there is no {path.name}")
        return Answer(path.read_bytes())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    return folder


def publish(monkeypatch, served, name):
    """Let the checksums of a data set be those of the files that are served."""
    downloads = {
        url: hashlib.md5((served / url.rpartition("/")[2]).read_bytes()).hexdigest()
        for url in ENTRIES[name].downloads
    }
    monkeypatch.setitem(ENTRIES, name, replace(ENTRIES[name], downloads=downloads))


@pytest.mark.parametrize("call", [load_dataset, dataset_info, find_dataset])
@pytest.mark.parametrize(
    ("name", "nearest"), [("cifar-10", "cifar10"), ("fashion_mnist", "fashion-mnist")]
)
def test_an_unknown_name_names_the_nearest(call, name, nearest):
    with pytest.raises(ValueError, match=f"`data` must be one of .*{name}.*mean '{nearest}'"):
        call(name)


# PAPER_FACTS, the paper's supplement: sizes, classes, translation, flips.
@pytest.mark.parametrize(
    ("name", "classes", "shape", "sizes", "padding", "flip"),
    [
        ("fashion-mnist", 10, (1, 28, 28), (60_000, 10_000), 4, True),
        ("cifar10", 10, (3, 32, 32), (50_000, 10_000), 4, True),
        ("cifar100", 100, (3, 32, 32), (50_000, 10_000), 4, True),
        ("tiny-imagenet", 200, (3, 64, 64), (100_000, 10_000), 8, True),
        ("imagenet", 1000, (3, 224, 224), (1_281_167, 50_000), 0, True),
        ("digits", 10, (1, 8, 8), (1437, 360), 1, False),
    ],
)
def test_what_is_known(name, classes, shape, sizes, padding, flip):
    info = dataset_info(name)
    assert (info.name, info.num_classes, info.shape) == (name, classes, shape)
    assert (info.num_train, info.num_test) == sizes
    assert (info.padding, info.flip) == (padding, flip)


def test_what_is_known_of_fashion_mnist_alone():
    info = dataset_info("fashion-mnist")
    assert (info.mean, info.std) == ((0.2860,), (0.3530,))
    assert SYSTEM_FOLDER.as_posix() == "/usr/share/datasets"  # where Debian's package puts it


def test_an_unset_variable_is_no_place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path / "cifar10")
    monkeypatch.setenv("SELECTCONV_DATA", "")
    assert find_dataset("cifar10") is None
    monkeypatch.delenv("SELECTCONV_DATA")
    assert find_dataset("cifar10") is None


def test_places_are_searched_in_order(places):
    order = [places["cache"], places["system"], places["given"]]
    for seed, base in enumerate(order):
        wanted = write_fashion_mnist(base / "fashion-mnist", seed=seed)
        found = load_dataset("fashion-mnist").train.images[:, 0].numpy()
        assert np.array_equal(found, wanted["train-images-idx3-ubyte"])
        assert find_dataset("fashion-mnist") == base / "fashion-mnist"


@pytest.mark.parametrize(
    ("name", "write", "place", "sizes"),
    [
        ("fashion-mnist", write_fashion_mnist, "fashion-mnist", (20, 10)),
        ("fashion-mnist", write_fashion_mnist, "FashionMNIST/raw", (20, 10)),
        ("fashion-mnist", write_fashion_mnist, ".", (20, 10)),
        ("cifar10", write_cifar10, "cifar-10-batches-bin", (15, 4)),
        ("cifar10", write_cifar10, "cifar10/cifar-10-batches-bin", (15, 4)),
        ("cifar10", write_cifar10, "cifar10", (15, 4)),
        ("cifar10", write_cifar10, ".", (15, 4)),
        ("cifar100", write_cifar100, "cifar-100-binary", (7, 4)),
        ("tiny-imagenet", write_tiny_imagenet, "tiny-imagenet-200", (6, 4)),
        ("imagenet", write_image_folder, "imagenet", (6, 2)),
    ],
)
def test_layouts(tmp_path, caplog, name, write, place, sizes):
    write(tmp_path / "root" / place)
    splits = load_dataset(name, str(tmp_path / "root"))
    assert (len(splits.train), len(splits.test)) == sizes
    assert splits.info is dataset_info(name)
    assert f"{sizes[0]} training and {sizes[1]} test images found; the full set has" in caplog.text


def test_a_root_is_exclusive(places, tmp_path):
    for base in places.values():
        write_fashion_mnist(base / "fashion-mnist")
    assert find_dataset("fashion-mnist") is not None
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    before = listing(tmp_path)
    for root in (tmp_path / "empty", tmp_path / "nowhere", tmp_path / "file"):
        assert find_dataset("fashion-mnist", root) is None
        # The network would fail the test with an AssertionError.
        message = rf"^No fashion-mnist in {root}\. Put fashion-mnist/ with .* into {root}\.$"
        for call in (load_dataset, check_present):
            with pytest.raises(DataError, match=message):
                call("fashion-mnist", root)
    assert listing(tmp_path) == before


def test_a_digest_is_of_all_images_and_labels(tmp_path):
    arrays = write_fashion_mnist(tmp_path / "zipped")
    write_fashion_mnist(tmp_path / "plain", zipped=False)
    write_fashion_mnist(tmp_path / "other", seed=1)
    in_order = (a if a.ndim == 3 else a.astype(np.int64) for a in arrays.values())
    wanted = hashlib.sha256(b"".join(array.tobytes() for array in in_order))
    found = [
        load_dataset("fashion-mnist", tmp_path / name, **more).digest
        for name, more in (
            ("zipped", {}),
            ("plain", {"subset": 3, "image_size": 14}),
            ("other", {}),
        )
    ]
    assert found[:2] == 2 * [wanted.hexdigest()]
    assert found[2] != found[0]
    for name in ("a", "b"):
        write_image_folder(tmp_path / name)
    next((tmp_path / "b" / "train").rglob("*.*")).rename(
        tmp_path / "b" / "train" / "n01" / "z.JPEG"
    )
    first, second = (load_dataset("imagenet", tmp_path / name).digest for name in ("a", "b"))
    assert first != second


def test_the_home_folder_may_be_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_cifar10(tmp_path / "data" / "cifar-10-batches-bin")
    assert len(load_dataset("cifar10", "~/data").train) == 15


def test_fetching_can_be_forbidden(places):
    known = ", ".join(map(str, places.values()))
    advice = f"Put cifar-10-binary.tar.gz .* into {places['cache']}, .*--data-root"
    with pytest.raises(DataError, match=rf"^No cifar10 in {known}\. {advice}\.$"):
        load_dataset("cifar10", fetch=False)
    assert not places["cache"].exists()


def test_a_set_that_can_be_fetched_need_not_be_present(places):
    check_present("cifar10", None)
    with pytest.raises(DataError, match="No imagenet in"):
        check_present("imagenet", None)


def test_an_incomplete_folder_is_named_with_what_is_missing(places):
    folder = places["given"] / "cifar-10-batches-bin"
    write_cifar10(folder)
    (folder / "data_batch_4.bin").unlink()
    for root in (None, places["given"]):
        with pytest.raises(DataError, match=f"{folder} is incomplete: it has no data_batch_4.bin"):
            load_dataset("cifar10", root)


def test_a_folder_that_belongs_to_others_is_passed_over(places):
    # ImageNet's train and val are not Tiny-ImageNet's.
    (places["given"] / "train").mkdir()
    write_cifar10(places["system"] / "cifar-10-batches-bin")
    assert find_dataset("tiny-imagenet") is None
    assert find_dataset("imagenet") is None
    assert find_dataset("cifar10") == places["system"] / "cifar-10-batches-bin"


def test_subsets(tmp_path):
    images, labels, test_images, test_labels = write_cifar10(tmp_path)
    splits = load_dataset("cifar10", tmp_path, subset=4, test_subset=2)
    order = np.random.RandomState([2019, 15]).permutation(15)[:4]
    assert np.array_equal(splits.train.images.numpy(), images[order])
    assert splits.train.labels.tolist() == labels[order].tolist()
    order = np.random.RandomState([2019, 4]).permutation(4)[:2]
    assert np.array_equal(splits.test.images.numpy(), test_images[order])
    assert splits.test.labels.tolist() == test_labels[order].tolist()


@pytest.mark.parametrize(("subset", "sizes"), [(4, [11, 4]), (15, [4]), (None, [4])])
def test_the_images_that_are_not_trained_on(tmp_path, subset, sizes):
    write_cifar10(tmp_path)  # 15 training images, 4 test images
    splits = load_dataset("cifar10", tmp_path, subset=subset, test_subset=2, holdout=True)
    everything = load_dataset("cifar10", tmp_path)
    assert [len(part) for part in splits.holdout] == sizes
    # Training images and the rest make up the training set; all test images follow.
    train = [splits.train, *splits.holdout[:-1]]
    pixels = sorted(tuple(image.flatten().tolist()) for part in train for image in part.images)
    assert pixels == sorted(tuple(image.flatten().tolist()) for image in everything.train.images)
    torch.testing.assert_close(splits.holdout[-1].images, everything.test.images)
    assert load_dataset("cifar10", tmp_path, subset=subset).holdout == ()


def test_held_out_images_are_shrunk_like_the_others(tmp_path):
    write_cifar10(tmp_path)
    splits = load_dataset("cifar10", tmp_path, subset=4, image_size=16, holdout=True)
    assert {tuple(part.images.shape[1:]) for part in splits.holdout} == {(3, 16, 16)}


@pytest.mark.parametrize("argument", ["subset", "test_subset"])
@pytest.mark.parametrize("size", [0, -3, 60_001])
def test_an_impossible_subset_is_refused_before_anything_is_fetched(argument, size):
    with pytest.raises(ValueError, match=f"`{argument}` must be at (least|most) .*got {size:,}"):
        load_dataset("fashion-mnist", **{argument: size})
    with pytest.raises(TypeError, match=rf"`{argument}` must be an integer.*got 0\.5"):
        load_dataset("cifar10", **{argument: 0.5})


def test_a_subset_larger_than_a_small_set_is_refused(tmp_path):
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"`subset` must be at most 15, .*cifar10; got 16"):
        load_dataset("cifar10", tmp_path, subset=16)


@pytest.mark.parametrize("inside", ["", "cifar10"])
def test_an_archive_is_unpacked_where_it_lies(tmp_path, inside):
    root = tmp_path / "root" / inside
    images, *_ = write_cifar10(tmp_path / "cifar-10-batches-bin")
    root.mkdir(parents=True)
    archive = root / "cifar-10-binary.tar.gz"
    archive_folder(archive, tmp_path / "cifar-10-batches-bin")
    assert find_dataset("cifar10", tmp_path / "root") == archive
    assert listing(root).keys() == {archive.name}  # finding changes nothing
    assert np.array_equal(load_dataset("cifar10", tmp_path / "root").train.images.numpy(), images)
    assert archive.exists()
    assert (root / "cifar-10-batches-bin").is_dir()
    archive.write_text("no longer looked at")
    assert len(load_dataset("cifar10", tmp_path / "root").train) == 15


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("cifar10", write_cifar10, "cifar-10-binary.tar.gz"),
        ("tiny-imagenet", write_tiny_imagenet, "tiny-imagenet-200.zip"),
    ],
)
def test_official_archives_are_fetched_unpacked_and_kept(
    served, monkeypatch, places, tmp_path, name, write, file
):
    folder = tmp_path / ENTRIES[name].places[0]
    write(folder)
    archive_folder(served / file, folder)
    publish(monkeypatch, served, name)
    wanted = load_dataset(name, tmp_path)
    for _ in range(2):
        assert torch.equal(load_dataset(name).train.images, wanted.train.images)
        (served / file).unlink(missing_ok=True)  # the second time nothing is asked for
    assert os.listdir(places["cache"]) == [folder.name]


@pytest.mark.parametrize("root", [None, "new/root"])
def test_fashion_mnist_is_fetched_from_its_host(served, monkeypatch, places, tmp_path, root):
    arrays = write_fashion_mnist(served)
    publish(monkeypatch, served, "fashion-mnist")
    target = places["cache"] if root is None else tmp_path / root
    for _ in range(2):
        folder = fetch_dataset("fashion-mnist", None if root is None else target)
        assert folder == target / "fashion-mnist"
    assert os.listdir(target) == ["fashion-mnist"]
    assert sorted(os.listdir(folder)) == sorted(
        f"{name}.gz" for name in small_images.FASHION_MNIST_FILES
    )
    assert places["cache"].exists() == (root is None)
    found = load_dataset("fashion-mnist", target).train.images[:, 0].numpy()
    assert np.array_equal(found, arrays["train-images-idx3-ubyte"])


@pytest.mark.parametrize(
    ("name", "trouble", "message"),
    [
        ("cifar10", "gone", "is not available: there is no"),
        ("cifar10", "changed", "of MD5 .*, wanted"),
        ("cifar10", "hostile", "is damaged or refused: .*outside"),
        ("fashion-mnist", "gone", "is not available: there is no"),
    ],
)
def test_what_cannot_be_fetched_is_said_and_leaves_nothing(
    served, monkeypatch, places, name, trouble, message
):
    write_fashion_mnist(served)
    write_tar(served / "cifar-10-binary.tar.gz", [("cifar-10-batches-bin/../../x", b"x")])
    publish(monkeypatch, served, name)
    last = served / list(ENTRIES[name].downloads)[-1].rpartition("/")[2]
    if trouble == "gone":
        last.unlink()
    if trouble == "changed":
        last.write_bytes(last.read_bytes() + b"\0")
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(name)
    text = str(caught.value)
    assert "\n" not in text
    assert f"Put {ENTRIES[name].wanted} into {places['cache']}, or" in text
    assert "--data-root" in text
    assert listing(places["cache"]) == {}


def test_imagenet_cannot_be_fetched(places):
    for call in (load_dataset, fetch_dataset):
        with pytest.raises(DataError, match="Put imagenet/ with train/ and val/, each"):
            call("imagenet")
    assert not places["cache"].exists()
    assert fetch_dataset("digits") is None


def test_a_cache_that_cannot_be_made_is_named(places):
    places["cache"].write_text("a file in the way")
    with pytest.raises(DataError, match=f"File exists: '{places['cache']}'.* Put cifar-10"):
        load_dataset("cifar10")


def test_downloads_have_checksums_and_archives_their_folders():
    for entry in ENTRIES.values():
        files = [url.rpartition("/")[2] for url in entry.downloads]
        assert {len(md5) for md5 in entry.downloads.values()} <= {32}
        if entry.archive:
            assert files == [entry.archive]
            assert "." not in entry.places[0]
        elif files:
            assert files == [f"{name}.gz" for name in entry.files]
