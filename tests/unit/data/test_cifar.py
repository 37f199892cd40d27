"""CIFAR's binary files: read right, or refused with the file's name."""

import numpy as np
import pytest

from data_files import cifar_records, write_cifar10, write_cifar100
from selectconv.errors import DataError
from selectconv.lab.data import load_dataset


@pytest.mark.parametrize(
    ("name", "write"), [("cifar10", write_cifar10), ("cifar100", write_cifar100)]
)
def test_reads_what_was_written(tmp_path, name, write):
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
