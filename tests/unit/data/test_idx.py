"""Fashion-MNIST's files: read right, or refused with the file's name."""

import dataclasses
import gzip

import numpy as np
import pytest
import torch

from data_files import fashion_arrays, idx_bytes, write_fashion_mnist
from selectconv.errors import DataError
from selectconv.lab.data import dataset_info
from selectconv.lab.data.read.idx import FILES, read_fashion_mnist

INFO = dataset_info("fashion-mnist")
IMAGES, LABELS = FILES[:2]


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
def test_reads_what_was_written(tmp_path, zipped):
    arrays = write_fashion_mnist(tmp_path, zipped=zipped, num_train=20, num_test=10)
    splits = read_fashion_mnist(tmp_path, INFO)
    for split, images, labels in zip(splits, FILES[::2], FILES[1::2], strict=True):
        assert split.images.dtype == torch.uint8
        assert np.array_equal(split.images.numpy(), arrays[images][:, None])
        assert split.labels.tolist() == arrays[labels].tolist()
        split.images.zero_()  # torch warns, and so fails here, about memory that is read-only


@pytest.mark.parametrize("name", FILES)
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
