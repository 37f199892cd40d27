"""CIFAR's binary files: read right, or refused with the file's name."""

import dataclasses

import numpy as np
import pytest

from data_files import cifar_records, write_cifar10, write_cifar100
from selectconv.errors import DataError
from selectconv.lab.data import dataset_info
from selectconv.lab.data.read.cifar import CIFAR10_FILES, read_cifar10, read_cifar100

CIFAR10, CIFAR100 = dataset_info("cifar10"), dataset_info("cifar100")


def assert_equal(split, images, labels):
    assert np.array_equal(split.images.numpy(), images)
    assert split.labels.tolist() == labels.tolist()


def test_cifar10_reads_what_was_written(tmp_path):
    train_images, train_labels, test_images, test_labels = write_cifar10(tmp_path)
    train, test = read_cifar10(tmp_path, CIFAR10)
    assert_equal(train, train_images, train_labels)
    assert_equal(test, test_images, test_labels)
    assert len(train) == 15
    assert train.images.is_contiguous()


def test_cifar100_reads_the_fine_labels(tmp_path):
    train_images, train_labels, test_images, test_labels = write_cifar100(tmp_path)
    train, test = read_cifar100(tmp_path, CIFAR100)
    assert_equal(train, train_images, train_labels)
    assert_equal(test, test_images, test_labels)
    assert min(train_labels) >= 20  # coarse labels would not be


@pytest.mark.parametrize("name", CIFAR10_FILES)
def test_a_missing_file_is_named(tmp_path, name):
    write_cifar10(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read: No such file"):
        read_cifar10(tmp_path, CIFAR10)


@pytest.mark.parametrize("cut", [1, 3072, 3073 * 3])
def test_a_truncated_file_is_refused(tmp_path, cut):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated or not a CIFAR-10 file: "):
        read_cifar10(tmp_path, CIFAR10)


def test_a_file_cut_at_a_record_is_noticed_beside_full_ones(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    full = dataclasses.replace(CIFAR10, num_train=15)
    with pytest.raises(
        DataError, match=r"data_batch_2.bin is truncated: it has 2 images, others 3"
    ):
        read_cifar10(tmp_path, full)
    # A set made small on purpose has no full file.
    assert len(read_cifar10(tmp_path, CIFAR10)[0]) == 14


def test_more_records_than_the_set_has_are_refused(tmp_path):
    write_cifar10(tmp_path, per_batch=3)
    small = dataclasses.replace(CIFAR10, num_train=10)
    with pytest.raises(DataError, match=r"data_batch_1.bin has 9,219 bytes, wanted at most 2 rec"):
        read_cifar10(tmp_path, small)


def test_a_label_out_of_range_is_refused(tmp_path):
    write_cifar10(tmp_path)
    images = np.zeros((3, 3, 32, 32), dtype=np.uint8)
    labels = np.array([[1], [2], [10]], dtype=np.uint8)
    (tmp_path / "data_batch_5.bin").write_bytes(cifar_records(labels, images))
    with pytest.raises(DataError, match=r"data_batch_5.bin: image 2 has label 10, wanted 0 to 9"):
        read_cifar10(tmp_path, CIFAR10)


@pytest.mark.parametrize(
    ("label", "message"),
    [((3, 100), "image 0 has label 100"), ((20, 3), "coarse labels.*image 0 has label 20")],
)
def test_both_labels_of_cifar100_are_checked(tmp_path, label, message):
    write_cifar100(tmp_path)
    images = np.zeros((1, 3, 32, 32), dtype=np.uint8)
    (tmp_path / "test.bin").write_bytes(cifar_records(np.array([label], dtype=np.uint8), images))
    with pytest.raises(DataError, match=f"test.bin.*{message}"):
        read_cifar100(tmp_path, CIFAR100)


def test_files_of_the_other_cifar_are_refused(tmp_path):
    write_cifar100(tmp_path, num_train=7)
    for name in CIFAR10_FILES:
        (tmp_path / name).write_bytes((tmp_path / "train.bin").read_bytes())
    with pytest.raises(DataError, match=r"data_batch_1\.bin is truncated or not a CIFAR-10 file"):
        read_cifar10(tmp_path, CIFAR10)
