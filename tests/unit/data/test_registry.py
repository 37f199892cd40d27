"""Where data sets are looked for, fetching, and what is said when they are not available."""

import dataclasses
import functools
import hashlib
import http.server
import os
import stat
import threading
import urllib.request

import numpy as np
import pytest
import torch

from data_files import (
    listing,
    tar_of_folder,
    write_cifar10,
    write_cifar100,
    write_fashion_mnist,
    write_image_folder,
    write_tar,
    write_tiny_imagenet,
    zip_of_folder,
)
from selectconv.errors import DataError
from selectconv.lab.data import (
    ImageFolder,
    cache_folder,
    catalogue,
    dataset_info,
    fetch_dataset,
    find_dataset,
    list_datasets,
    load_dataset,
    where_to_look,
)
from selectconv.lab.data.obtain import places as places_module
from selectconv.lab.data.obtain import sources
from selectconv.lab.data.obtain.fetch import Download
from selectconv.lab.data.read import idx

SYSTEM_FOLDER = places_module.SYSTEM_FOLDER  # every test has another one


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """The three known places, empty; no network; no Debian."""
    result = {name: tmp_path / name for name in ("given", "system", "cache", "bin")}
    for path in result.values():
        path.mkdir()
    monkeypatch.setenv("SELECTCONV_DATA", str(result["given"]))
    monkeypatch.setattr(places_module, "SYSTEM_FOLDER", result["system"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(result["cache"]))
    monkeypatch.setenv("PATH", str(result["bin"]))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def no_network(request, timeout):
        raise AssertionError(f"a test reached for {request.full_url}")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    return result


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Serves the files of a folder, with the network limited to it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def only_here(request, timeout):
        assert request.full_url.startswith("http://127.0.0.1:"), request.full_url
        return opener.open(request, timeout=timeout)

    monkeypatch.setattr("urllib.request.urlopen", only_here)
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        running.folder = folder
        running.url = f"http://127.0.0.1:{running.server_address[1]}/"
        yield running
        running.shutdown()


def publish(monkeypatch, server, name):
    """Point the downloads of a data set at the server's files."""
    downloads = tuple(
        Download(server.url + old.file_name, md5_of(server.folder / old.file_name), old.max_bytes)
        for old in sources.DOWNLOADS[name]
    )
    monkeypatch.setitem(sources.DOWNLOADS, name, downloads)


def md5_of(path):
    return hashlib.md5(path.read_bytes()).hexdigest() if path.exists() else "0" * 32


def make_small(monkeypatch, **changes):
    """Fashion-MNIST with another size and other statistics, for packages that must be whole."""
    entry = catalogue.ENTRIES["fashion-mnist"]
    small = dataclasses.replace(entry, info=dataclasses.replace(entry.info, **changes))
    monkeypatch.setitem(catalogue.ENTRIES, "fashion-mnist", small)


def test_the_names():
    assert list_datasets() == [
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "tiny-imagenet",
        "imagenet",
        "digits",
    ]


@pytest.mark.parametrize("call", [load_dataset, dataset_info, where_to_look, find_dataset])
@pytest.mark.parametrize(
    ("name", "nearest"), [("cifar-10", "cifar10"), ("fashion_mnist", "fashion-mnist")]
)
def test_an_unknown_name_names_the_nearest(call, name, nearest):
    with pytest.raises(ValueError, match=f"`name` must be one of .*{name}.*mean '{nearest}'"):
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
    assert info.name == name
    assert (info.num_classes, info.shape) == (classes, shape)
    assert (info.num_train, info.num_test) == sizes
    assert (info.padding, info.flip) == (padding, flip)


def test_fashion_mnist_has_its_own_statistics():
    assert dataset_info("fashion-mnist").mean == (0.2860,)
    assert dataset_info("fashion-mnist").std == (0.3530,)


def test_where_to_look(places):
    looked = where_to_look("cifar10")
    bases = [places["given"], places["system"], places["cache"] / "selectconv"]
    inside = ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."]
    assert looked == [base / part for base in bases for part in inside]
    assert where_to_look("cifar10", "elsewhere")[0].parent.name == "elsewhere"
    assert len(where_to_look("cifar10", "elsewhere")) == 4
    assert where_to_look("digits") == []


def test_the_system_folder_is_debians():
    assert SYSTEM_FOLDER.as_posix() == "/usr/share/datasets"


def test_the_cache_without_a_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "selectconv"


def test_an_unset_variable_is_no_place(monkeypatch, places):
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("SELECTCONV_DATA")
        else:
            monkeypatch.setenv("SELECTCONV_DATA", value)
        assert where_to_look("cifar10")[0].parent == places["system"]


def test_places_are_searched_in_order(places):
    order = [places["cache"] / "selectconv", places["system"], places["given"]]
    for seed, base in enumerate(order):
        wanted = write_fashion_mnist(base / "fashion-mnist", seed=seed)
        found = load_dataset("fashion-mnist").train.images[:, 0].numpy()
        assert np.array_equal(found, wanted["train-images-idx3-ubyte"])
        assert find_dataset("fashion-mnist") == base / "fashion-mnist"


@pytest.mark.parametrize("part", ["fashion-mnist", "FashionMNIST/raw", "."])
@pytest.mark.parametrize("zipped", [True, False])
def test_layouts_of_fashion_mnist(tmp_path, part, zipped):
    write_fashion_mnist(tmp_path / "root" / part, zipped=zipped)
    splits = load_dataset("fashion-mnist", tmp_path / "root")
    assert (len(splits.train), len(splits.test)) == (20, 10)
    assert splits.info is dataset_info("fashion-mnist")


@pytest.mark.parametrize(
    "part", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."]
)
def test_layouts_of_cifar10(tmp_path, part):
    images, labels, *_ = write_cifar10(tmp_path / "root" / part)
    train = load_dataset("cifar10", str(tmp_path / "root")).train
    assert np.array_equal(train.images.numpy(), images)
    assert train.labels.tolist() == labels.tolist()


def test_cifar100_tiny_imagenet_and_imagenet_are_found(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary")
    assert len(load_dataset("cifar100", tmp_path).train) == 7
    pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    assert len(load_dataset("tiny-imagenet", tmp_path).test) == 4
    write_image_folder(tmp_path / "imagenet")
    splits = load_dataset("imagenet", tmp_path, subset=3)
    assert isinstance(splits.train, ImageFolder)
    assert len(splits.train) == 3
    assert splits.train[0][0].shape == (3, 224, 224)


def test_a_root_is_exclusive(places, tmp_path):
    for base in (places["given"], places["system"], places["cache"] / "selectconv"):
        write_fashion_mnist(base / "fashion-mnist")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert find_dataset("fashion-mnist") is not None
    assert find_dataset("fashion-mnist", empty) is None
    # The network would fail the test with an AssertionError.
    with pytest.raises(
        DataError, match=rf"^No fashion-mnist in {empty}: put fashion-mnist/ with .* there\.$"
    ):
        load_dataset("fashion-mnist", empty)
    assert listing(empty) == {}


def test_a_root_that_is_not_there_is_named(tmp_path):
    for root in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(DataError, match=f"No cifar10 in {root}: put cifar-10-binary.tar.gz"):
            load_dataset("cifar10", root)


def test_the_home_folder_may_be_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_cifar10(tmp_path / "data" / "cifar-10-batches-bin")
    assert len(load_dataset("cifar10", "~/data").train) == 15


def test_fetching_can_be_forbidden(places):
    known = f"{places['given']}, {places['system']}, {places['cache']}/selectconv"
    advice = f"Put cifar-10-binary.tar.gz .* into {places['cache']}/selectconv, .*--data-root"
    message = rf"^No cifar10 in {known}\. {advice}\.$"
    with pytest.raises(DataError, match=message):
        load_dataset("cifar10", fetch=False)
    assert listing(places["cache"]) == {}


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


def test_a_small_set_is_noticed(tmp_path, caplog):
    write_cifar10(tmp_path)
    load_dataset("cifar10", tmp_path)
    assert "15 training and 4 test images found; the full set has 50,000" in caplog.text


def test_a_damaged_file_is_named_and_nothing_else_is_tried(places):
    write_fashion_mnist(places["system"] / "fashion-mnist")
    folder = places["given"] / "fashion-mnist"
    write_fashion_mnist(folder)
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{path} cannot be read; it is damaged"):
        load_dataset("fashion-mnist")


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


def test_a_subset_larger_than_a_small_set_is_refused(tmp_path):
    write_cifar10(tmp_path)
    with pytest.raises(
        ValueError, match="`subset` must be at most 15, the images of cifar10; got 16"
    ):
        load_dataset("cifar10", tmp_path, subset=16)


def test_a_subset_must_be_an_integer():
    with pytest.raises(TypeError, match=r"`subset` must be an integer.*got 0\.5"):
        load_dataset("cifar10", subset=0.5)


@pytest.mark.parametrize("inside", ["", "cifar10"])
def test_an_archive_is_unpacked_where_it_lies(tmp_path, inside):
    root = tmp_path / "root" / inside
    images, *_ = write_cifar10(tmp_path / "cifar-10-batches-bin")
    root.mkdir(parents=True)
    archive = root / "cifar-10-binary.tar.gz"
    tar_of_folder(archive, tmp_path / "cifar-10-batches-bin")
    assert find_dataset("cifar10", tmp_path / "root") == archive
    assert listing(root).keys() == {archive.name}  # finding changes nothing
    train = load_dataset("cifar10", tmp_path / "root").train
    assert np.array_equal(train.images.numpy(), images)
    assert archive.exists()
    assert (root / "cifar-10-batches-bin").is_dir()
    archive.write_text("no longer looked at")
    assert len(load_dataset("cifar10", tmp_path / "root").train) == 15


def test_a_hostile_archive_is_refused_and_nothing_is_written(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    write_tar(root / "cifar-10-binary.tar.gz", [("cifar-10-batches-bin/../../x", b"x")])
    before = listing(tmp_path)
    with pytest.raises(DataError, match=r"is refused: member .* leads out of its folder"):
        load_dataset("cifar10", root)
    assert listing(tmp_path) == before


def test_official_archives_are_fetched_unpacked_and_kept(server, monkeypatch, places, tmp_path):
    images, *_ = write_cifar10(tmp_path / "cifar-10-batches-bin")
    tar_of_folder(server.folder / "cifar-10-binary.tar.gz", tmp_path / "cifar-10-batches-bin")
    publish(monkeypatch, server, "cifar10")
    for _ in range(2):
        train = load_dataset("cifar10").train
        assert np.array_equal(train.images.numpy(), images)
        # The second time nothing is asked for.
        (server.folder / "cifar-10-binary.tar.gz").unlink(missing_ok=True)
    kept = places["cache"] / "selectconv"
    assert os.listdir(kept) == ["cifar-10-batches-bin"]


def test_tiny_imagenet_is_fetched_from_a_zip_file(server, monkeypatch, places, tmp_path):
    pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    zip_of_folder(server.folder / "tiny-imagenet-200.zip", tmp_path / "tiny-imagenet-200")
    publish(monkeypatch, server, "tiny-imagenet")
    assert load_dataset("tiny-imagenet").test.labels.tolist() == [1, 2, 0, 1]
    assert os.listdir(places["cache"] / "selectconv") == ["tiny-imagenet-200"]


def test_fashion_mnist_is_fetched_from_its_host(server, monkeypatch, places):
    arrays = write_fashion_mnist(server.folder)
    publish(monkeypatch, server, "fashion-mnist")
    found = load_dataset("fashion-mnist").train.images[:, 0].numpy()
    assert np.array_equal(found, arrays["train-images-idx3-ubyte"])
    kept = places["cache"] / "selectconv"
    assert os.listdir(kept) == ["fashion-mnist"]
    assert sorted(os.listdir(kept / "fashion-mnist")) == sorted(f"{n}.gz" for n in idx.FILES)


def test_fetching_into_a_folder(server, monkeypatch, tmp_path, places):
    write_fashion_mnist(server.folder)
    publish(monkeypatch, server, "fashion-mnist")
    root = tmp_path / "new" / "root"
    assert fetch_dataset("fashion-mnist", root) == root / "fashion-mnist"
    assert fetch_dataset("fashion-mnist", root) == root / "fashion-mnist"
    assert listing(places["cache"]) == {}
    assert fetch_dataset("digits") is None


@pytest.mark.parametrize("trouble", ["gone", "wrong checksum", "truncated archive", "hostile"])
def test_what_cannot_be_fetched_is_said_and_leaves_nothing(
    server, monkeypatch, places, tmp_path, trouble
):
    archive = server.folder / "cifar-10-binary.tar.gz"
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    if trouble == "hostile":
        write_tar(archive, [("cifar-10-batches-bin/../../../x", b"x")])
    else:
        tar_of_folder(archive, tmp_path / "cifar-10-batches-bin")
    if trouble == "truncated archive":
        archive.write_bytes(archive.read_bytes()[:-20])
    publish(monkeypatch, server, "cifar10")
    if trouble == "gone":
        archive.unlink()
    if trouble == "wrong checksum":
        archive.write_bytes(archive.read_bytes() + b"\0")
    message = {
        "gone": "status 404",
        "wrong checksum": "has the MD5",
        "truncated archive": "damaged or truncated",
        "hostile": "leads out of its folder",
    }[trouble]
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("cifar10")
    text = str(caught.value)
    assert "\n" not in text
    assert "Put cifar-10-binary.tar.gz or the unpacked" in text
    assert str(places["cache"] / "selectconv") in text
    assert "--data-root" in text
    assert listing(places["cache"]) == {"selectconv": -1}


def test_imagenet_cannot_be_fetched(places):
    for call in (load_dataset, fetch_dataset):
        with pytest.raises(
            DataError, match="Put imagenet/ with train/ and val/, each with one fol"
        ):
            call("imagenet")
    assert listing(places["cache"]) == {}


def test_a_cache_that_cannot_be_made_is_named(places):
    (places["cache"] / "selectconv").write_text("a file in the way")
    with pytest.raises(DataError, match="selectconv cannot be created: File exists"):
        load_dataset("cifar10")


@pytest.fixture
def debian(places, monkeypatch, tmp_path):
    """apt-get and dpkg-deb as far as we use them; the official host does not answer."""

    def no_answer(request, timeout):
        raise OSError("no network today")

    monkeypatch.setattr("urllib.request.urlopen", no_answer)
    monkeypatch.setenv("PATH", f"{places['bin']}{os.pathsep}/usr/bin{os.pathsep}/bin")
    package = tmp_path / "package"
    files = package / "usr" / "share" / "datasets" / "fashion-mnist"
    log = tmp_path / "log"

    def script(name, text):
        path = places["bin"] / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{text}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    script("apt-get", 'case "$*" in *download*) echo deb > dataset-fashion-mnist_1_all.deb;; esac')
    script("dpkg-deb", f'cp -r {package}/. "$3"')
    return files, log, script


def statistics(arrays):
    pixels = arrays["train-images-idx3-ubyte"] / 255
    return {"mean": (float(pixels.mean()),), "std": (float(pixels.std()),)}


def test_debians_package_is_unpacked_where_the_host_does_not_answer(debian, places, monkeypatch):
    files, log, _ = debian
    arrays = write_fashion_mnist(files)
    make_small(monkeypatch, num_train=20, num_test=10, **statistics(arrays))
    splits = load_dataset("fashion-mnist")
    assert np.array_equal(splits.train.images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    kept = places["cache"] / "selectconv"
    assert os.listdir(kept) == ["fashion-mnist"]
    assert sorted(os.listdir(kept / "fashion-mnist")) == sorted(f"{n}.gz" for n in idx.FILES)
    update, download, unpack = log.read_text().splitlines()
    for line in (update, download):
        # Lists and cache of our own: no root needed, and the system stays as it is.
        assert "-o Dir::State::Lists=" in line
        assert "-o Dir::Cache=" in line
        assert "-o Debug::NoLocking=1" in line
        assert str(kept) in line
    assert update.endswith(" update")
    assert download.endswith(" download dataset-fashion-mnist")
    assert unpack.startswith("dpkg-deb -x ")
    load_dataset("fashion-mnist")
    assert len(log.read_text().splitlines()) == 3


def test_a_package_with_other_content_is_refused(debian, places, monkeypatch):
    files, _, _ = debian
    arrays = write_fashion_mnist(files)
    true = statistics(arrays)
    cases = [
        ({"num_train": 21, "num_test": 10, **true}, r"has \(20, 10\) images: not Fashion-MNIST"),
        ({"num_train": 20, "num_test": 11, **true}, r"has \(20, 10\) images: not Fashion-MNIST"),
        ({"num_train": 20, "num_test": 10, **true, "std": (true["std"][0] + 1e-3,)}, "not Fashion"),
        ({"num_train": 20, "num_test": 10, **true, "mean": (true["mean"][0] + 1e-3,)}, "not Fash"),
        ({"num_train": 20, "num_test": 10, **true, "mean": (0.9,)}, "does not hold Fashion-MNIST"),
    ]
    for changes, message in cases:
        make_small(monkeypatch, **changes)
        with pytest.raises(DataError, match=message):
            load_dataset("fashion-mnist")
        assert listing(places["cache"] / "selectconv") == {}


def test_a_package_without_a_file_is_refused(debian, places):
    files, _, _ = debian
    write_fashion_mnist(files)
    (files / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="Debian's package has no t10k-labels-idx1-ubyte"):
        load_dataset("fashion-mnist")
    assert listing(places["cache"] / "selectconv") == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("apt-get", "echo 'W: slow' >&2; echo 'E: no lists' >&2; exit 100", "update: E: no lists"),
        ("apt-get", "exit 7", "apt-get update: exit code 7"),
        ("apt-get", "true", "apt-get left 0 packages"),
        ("dpkg-deb", "echo 'dpkg-deb: error: broken' >&2; exit 2", "dpkg-deb: error: broken"),
        ("dpkg-deb", "true", "has no folder usr/share/datasets/fashion-mnist"),
    ],
)
def test_trouble_with_the_package_is_passed_on(debian, places, name, text, message):
    _, _, script = debian
    script(name, text)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("fashion-mnist")
    said = str(caught.value)
    assert "train-images-idx3-ubyte.gz is not available: no network today" in said
    assert "Put fashion-mnist/ with train-images-idx3-ubyte.gz, " in said
    assert "\n" not in said
    assert listing(places["cache"] / "selectconv") == {}


def test_a_package_that_takes_too_long_is_given_up(debian, places, monkeypatch):
    _, _, script = debian
    script("apt-get", "exec sleep 5")
    monkeypatch.setattr("selectconv.lab.data.obtain.debian._TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match=r"timed out after 0\.2 seconds"):
        load_dataset("fashion-mnist")
    assert listing(places["cache"] / "selectconv") == {}


def test_where_there_is_no_debian_it_is_said(debian, monkeypatch, places):
    monkeypatch.setenv("PATH", str(places["cache"]))
    with pytest.raises(DataError, match=r"there is no apt-get and no dpkg-deb\."):
        load_dataset("fashion-mnist")


def test_another_process_may_fetch_faster(debian, places, monkeypatch):
    files, _, _ = debian
    arrays = write_fashion_mnist(files)
    make_small(monkeypatch, num_train=20, num_test=10, **statistics(arrays))
    real = os.rename

    def others_first(source, target):
        write_fashion_mnist(target)
        real(source, target)

    monkeypatch.setattr(sources.os, "rename", others_first)
    assert len(load_dataset("fashion-mnist").train) == 20


def test_downloads_have_checksums_and_official_hosts():
    for name, downloads in sources.DOWNLOADS.items():
        assert name in list_datasets()
        for download in downloads:
            assert len(download.md5) == 32
            assert download.max_bytes < 10**9
    names = [download.file_name for download in sources.DOWNLOADS["fashion-mnist"]]
    assert names == [f"{name}.gz" for name in idx.FILES]
    for name, archive in sources.ARCHIVES.items():
        assert sources.DOWNLOADS[name][0].file_name == archive.name
        assert catalogue.ENTRIES[name].places[0] == archive.top


def test_images_can_be_used_as_they_come(tmp_path):
    write_cifar10(tmp_path)
    train = load_dataset("cifar10", tmp_path).train
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
