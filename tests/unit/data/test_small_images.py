"""Fashion-MNIST, CIFAR, digits, Tiny-ImageNet: read right, or refused with the file's name."""

import dataclasses
import gzip

import numpy as np
import pytest
import torch

from data_files import (
    TINY_CLASSES,
    cifar_records,
    fashion_arrays,
    idx_bytes,
    listing,
    write_cifar10,
    write_cifar100,
    write_fashion_mnist,
    write_tiny_imagenet,
)
from selectconv.errors import DataError, UsageError
from selectconv.lab.data import ImageSet, dataset_info, find_dataset, load_dataset, subset_index
from selectconv.lab.data.read.small_images import (
    FASHION_MNIST_FILES,
    read_fashion_mnist,
    read_tiny_imagenet,
)

INFO, TINY = dataset_info("fashion-mnist"), dataset_info("tiny-imagenet")
IMAGES, LABELS = FASHION_MNIST_FILES[:2]


@pytest.fixture
def folder(tmp_path):
    write_fashion_mnist(tmp_path)
    return tmp_path


def assert_refused(folder, path, message, info=INFO):
    with pytest.raises(DataError, match=message) as caught:
        read_fashion_mnist(folder, info)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_read_as_written(tmp_path, zipped):
    arrays = write_fashion_mnist(tmp_path, zipped=zipped, num_train=20, num_test=10)
    splits = read_fashion_mnist(tmp_path, INFO)
    for split, images, labels in zip(
        splits, FASHION_MNIST_FILES[::2], FASHION_MNIST_FILES[1::2], strict=True
    ):
        assert split.images.dtype == torch.uint8
        assert np.array_equal(split.images.numpy(), arrays[images][:, None])
        assert split.labels.tolist() == arrays[labels].tolist()
        split.images.zero_()  # torch warns, and so fails here, about memory that is read-only


@pytest.mark.parametrize("name", FASHION_MNIST_FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / f"{name}.gz").unlink()
    assert_refused(folder, folder / f"{name}.gz", "cannot be read")


CONTENT = {name: idx_bytes(array) for name, array in fashion_arrays().items()}
ONE_TOO_HIGH = np.where(np.arange(20) == 7, 10, 0)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((IMAGES, CONTENT[IMAGES][:size], r"is truncated, damaged or not .*28, 28\) bytes: it has")
          for size in (0, 3, 4, 15, 16, 680, -1)),
        *((IMAGES, magic + CONTENT[IMAGES][4:], f"starts with {magic.hex(' ')}")
          for magic in (b"\0\0\x08\x01", b"\0\0\x0d\x03", b"\x93NUM", b"<htm")),
        *((IMAGES, idx_bytes(np.zeros(shape)), "is truncated, damaged or not .*28, 28")
          for shape in ((20, 27, 28), (20, 28, 14), (0, 28, 28))),
        (LABELS, CONTENT[LABELS] + b"x", "it has 29 bytes"),
        (LABELS, idx_bytes(np.zeros(19)), "has 19 labels for 20 images"),
        (LABELS, idx_bytes(ONE_TOO_HIGH), "image 7 has label 10, wanted 0 to 9"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(folder, zipped, name, content, message):
    (folder / f"{name}.gz").unlink()
    path = folder / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert_refused(folder, folder / name, message)


@pytest.mark.parametrize("cut", [1, 7, 500])
def test_a_truncated_gzip_file_is_refused(folder, cut):
    path = folder / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-cut])
    assert_refused(folder, path, "cannot be read; it is damaged or incomplete")


@pytest.mark.parametrize("at", [12, 2000, -6])
def test_one_wrong_byte_of_a_gzip_file_is_noticed(folder, at):
    path = folder / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(bytes(content))
    assert_refused(folder, path, "damaged")


def test_no_more_is_read_than_the_set_has(folder):
    small = dataclasses.replace(INFO, num_train=19)
    assert_refused(folder, folder / f"{IMAGES}.gz", "it has 14,913 bytes", small)  # of 15,696


def test_mnist_in_the_same_files_is_refused(folder):
    mean = fashion_arrays()[IMAGES].mean() / 255
    same = dataclasses.replace(INFO, num_train=20, mean=(mean,))
    assert len(read_fashion_mnist(folder, same)[0]) == 20
    other = dataclasses.replace(same, mean=(mean - 0.02,))
    assert_refused(folder, folder, f"does not hold Fashion-MNIST: .* mean {mean:.4f}", other)


# CIFAR


@pytest.mark.parametrize(
    ("name", "write"), [("cifar10", write_cifar10), ("cifar100", write_cifar100)]
)
def test_cifar_is_read_as_written(tmp_path, name, write):
    written, splits = write(tmp_path), load_dataset(name, tmp_path)
    for split, images, labels in ((splits.train, *written[:2]), (splits.test, *written[2:])):
        assert np.array_equal(split.images.numpy(), images)
        assert split.images.is_contiguous()
        assert split.labels.tolist() == labels.tolist()
        assert name == "cifar10" or min(labels) >= 20  # coarse labels would not be


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3073 * 3 - 1, "is truncated or not a CIFAR-10 file: 9,218 bytes"),
        (3073 * 2 + 1, "is truncated or not a CIFAR-10 file"),
        (0, "is truncated or not a CIFAR-10 file: 0 bytes"),
        (3073 * 2, "is truncated: it has 2 images, others 3"),
        (3074 * 7, "is truncated or not a CIFAR-10 file"),  # of CIFAR-100
    ],
)
def test_a_file_of_another_size_is_refused(tmp_path, size, message):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match=f"{path} {message}"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "write", "file", "label"),
    [("cifar10", write_cifar10, "data_batch_5.bin", [10]),
     ("cifar100", write_cifar100, "test.bin", [3, 100])],
)  # fmt: skip
def test_a_label_out_of_range_is_refused(tmp_path, name, write, file, label):
    write(tmp_path)
    labels = np.array([[1] * len(label)] * 2 + [label], dtype=np.uint8)
    images = np.zeros((3, 3, 32, 32), dtype=np.uint8)
    (tmp_path / file).write_bytes(cifar_records(labels, images))
    with pytest.raises(DataError, match=rf"{file}: image 2 has label {label[-1]}, wanted 0 to"):
        load_dataset(name, tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch.bin").mkdir()
    with pytest.raises(DataError, match=r"test_batch\.bin cannot be read: Is a directory"):
        load_dataset("cifar10", tmp_path)


# The digits of scikit-learn


def test_the_split_of_digits_is_that_of_the_data_set():
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    splits = load_dataset("digits")
    train, test = splits.train, splits.test
    assert (len(train), len(test)) == (1437, 360)
    assert torch.cat([train.labels, test.labels]).tolist() == digits.target.tolist()
    pixels = torch.cat([train.images, test.images]).numpy()[:, 0] / 255 * 16
    assert np.abs(pixels - digits.images).max() < 0.05  # sixteenths of 255, rounded
    # Every class is in both splits.
    assert train.labels.bincount().min() > 100
    assert test.labels.bincount().min() > 25


def test_statistics_of_digits_are_those_of_the_training_set():
    splits = load_dataset("digits")
    pixels = splits.train.images.double() / 255
    assert abs(float(pixels.mean()) - splits.info.mean[0]) < 5e-5
    assert abs(float(pixels.std(correction=0)) - splits.info.std[0]) < 5e-5


def test_a_root_of_digits_changes_nothing_but_must_be_there(tmp_path):
    assert len(load_dataset("digits", tmp_path).train) == 1437
    for call in (load_dataset, find_dataset):
        with pytest.raises(UsageError, match=r"`data_root` must be a folder; .*nowhere"):
            call("digits", tmp_path / "nowhere")


# Images in memory: a fixed choice of them, and smaller ones


# The contract: the same subset in every run, on every machine, in every version.
@pytest.mark.parametrize(
    ("num_images", "first"),
    [
        (60_000, [1055, 35744, 11724, 11086]),
        (50_000, [8942, 18820, 2615, 32611]),
        (10_000, [1691, 5242, 8829]),
        (1, [0]),
    ],
)
def test_the_subset_is_fixed(num_images, first):
    torch.manual_seed(17)  # must not matter
    assert subset_index(num_images, len(first)).tolist() == first


def test_a_smaller_subset_starts_a_larger_one_and_all_is_all():
    whole = subset_index(500, 500)
    assert sorted(whole.tolist()) == list(range(500))
    assert torch.equal(subset_index(500, 40), whole[:40])
    assert whole.dtype == torch.int64


def test_smaller_pixels_are_means_of_what_they_cover():
    images = torch.randint(256, (5000, 3, 4, 4), dtype=torch.uint8)  # more than are shrunk at once
    small = ImageSet(images, torch.arange(5000)).shrunk(2)
    assert small.images.dtype == torch.uint8
    assert small.labels.tolist() == list(range(5000))
    means = images.float().view(5000, 3, 2, 2, 2, 2).mean((3, 5))  # of two rows, two columns
    assert (small.images.float() - means).abs().max() <= 0.5


def test_shape_and_padding_follow():
    info = dataset_info("cifar10", 16)
    assert (info.shape, info.padding) == ((3, 16, 16), 2)
    assert dataset_info("cifar10").shape == (3, 32, 32)
    splits = load_dataset("digits", subset=10, image_size=4)
    assert splits.train.images.shape == (10, 1, 4, 4)
    assert splits.info.shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("cifar10", 15, "`image_size` must divide 32, .*got 15"),
        ("cifar10", 64, "must divide 32"),
        ("cifar10", 0, "`image_size` must be at least 1"),
        ("imagenet", 112, "imagenet's are cropped to 224"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, size, message):
    with pytest.raises(ValueError, match=message):
        dataset_info(name, size)


# Tiny-ImageNet as distributed: classes, annotations, decoding

ANNOTATIONS = "val/val_annotations.txt"
# JPEG rounds.
STEP = 2


@pytest.fixture
def tiny(tmp_path):
    pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    return tmp_path / "tiny-imagenet-200"


def greys(split):
    flat = split.images.flatten(1).int()
    assert (flat.max(1).values - flat.min(1).values).max() <= STEP
    return flat.float().mean(1).round().int().tolist()


def assert_near(values, wanted):
    assert len(values) == len(wanted)
    assert max(abs(a - b) for a, b in zip(values, wanted, strict=True)) <= STEP


def test_training_images_come_by_class_in_the_order_of_wnids(tiny):
    train, _ = read_tiny_imagenet(tiny, TINY)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    # Greys were dealt out in the order of TINY_CLASSES, which is not sorted.
    assert list(TINY_CLASSES) != sorted(TINY_CLASSES)
    assert_near(greys(train), [10, 20, 30, 40, 50, 60])
    assert train.images.shape == (6, 3, 64, 64)
    assert train.images.dtype == torch.uint8


def test_validation_images_follow_the_annotations(tiny):
    _, test = read_tiny_imagenet(tiny, TINY)
    # val_2: n01, val_0: n02, val_10: n03, val_1: n01; wnids.txt: n03, n01, n02.
    assert test.labels.tolist() == [1, 2, 0, 1]
    assert_near(greys(test), [70, 80, 90, 100])


def test_colours_stay_in_their_channels(tiny):
    from PIL import Image

    path = tiny / "val" / "images" / "val_2.JPEG"
    Image.new("RGB", (64, 64), (200, 100, 30)).save(path, quality=95)
    _, test = read_tiny_imagenet(tiny, TINY)
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
def test_wrong_files_are_refused_and_nothing_is_written(tiny, name, text, message):
    content = (tiny / name).read_bytes()[:-30]
    (tiny / name).unlink()
    if text is not None:
        (tiny / name).write_bytes(content if text == "truncated" else text.encode())
    before = listing(tiny)
    with pytest.raises(DataError, match=message):
        read_tiny_imagenet(tiny, TINY)
    assert listing(tiny) == before
