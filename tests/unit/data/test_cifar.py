"""CIFAR's binary files: read right, or refused with the file's name."""

import numpy as np
import pytest

from data_files import cifar_records, write_cifar10, write_cifar100
from selectconv.errors import DataError
from selectconv.lab.data import load_dataset


def assert_equal(split, images, labels):
    assert np.array_equal(split.images.numpy(), images)
    assert split.images.is_contiguous()
    assert split.labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("name", "write"), [("cifar10", write_cifar10), ("cifar100", write_cifar100)]
)
def test_reads_what_was_written(tmp_path, name, write):
    train_images, train_labels, test_images, test_labels = write(tmp_path)
    splits = load_dataset(name, tmp_path)
    assert_equal(splits.train, train_images, train_labels)
    assert_equal(splits.test, test_images, test_labels)
    if name == "cifar100":
        assert min(train_labels) >= 20  # coarse labels would not be


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (1, "is truncated or not a CIFAR-10 file: 9,218 bytes"),
        (3072, "is truncated or not a CIFAR-10 file"),
        (3073 * 3, "is truncated or not a CIFAR-10 file: 0 bytes"),
        (3073, "is truncated: it has 2 images, others 3"),
    ],
)
def test_a_truncated_file_is_refused(tmp_path, cut, message):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-cut])
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


def test_files_of_the_other_cifar_are_refused(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes((tmp_path / "train.bin").read_bytes())
    with pytest.raises(DataError, match=r"data_batch_1\.bin is truncated or not a CIFAR-10 file"):
        load_dataset("cifar10", tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch.bin").mkdir()
    with pytest.raises(DataError, match=r"test_batch\.bin cannot be read: Is a directory"):
        load_dataset("cifar10", tmp_path)
