"""Fashion-MNIST's files: read right, or refused with the file's name."""

import dataclasses
import gzip

import numpy as np
import pytest
import torch

from data_files import fashion_arrays, idx_bytes, write_fashion_mnist
from selectconv.errors import DataError
from selectconv.lab.data import dataset_info
from selectconv.lab.data.read.idx import FILES, read_fashion_mnist, read_idx

INFO = dataset_info("fashion-mnist")
IMAGES, LABELS = FILES[:2]


def write(folder, name, content, zipped=False):
    for path in (folder / name, folder / f"{name}.gz"):
        path.unlink(missing_ok=True)
    path = folder / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_was_written(tmp_path, zipped):
    arrays = write_fashion_mnist(tmp_path, zipped=zipped, num_train=20, num_test=10)
    splits = read_fashion_mnist(tmp_path, INFO)
    for split, images, labels in zip(splits, FILES[::2], FILES[1::2], strict=True):
        assert split.images.dtype == torch.uint8
        assert np.array_equal(split.images.numpy(), arrays[images][:, None])
        assert split.labels.tolist() == arrays[labels].tolist()
    assert splits[0].images.shape == (20, 1, 28, 28)


def test_gzip_is_recognised_by_content_not_by_name(tmp_path):
    write_fashion_mnist(tmp_path)
    zipped = (tmp_path / f"{IMAGES}.gz").read_bytes()
    write(tmp_path, IMAGES, zipped)
    assert len(read_fashion_mnist(tmp_path, INFO)[0]) == 20


def test_the_images_can_be_written_to(tmp_path):
    write_fashion_mnist(tmp_path)
    train, _ = read_fashion_mnist(tmp_path, INFO)
    train.images.zero_()  # torch warns, and so fails here, about memory that is read-only
    assert not train.images.any()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    write_fashion_mnist(tmp_path)
    (tmp_path / f"{name}.gz").unlink()
    with pytest.raises(DataError, match=f"has no {name}"):
        read_fashion_mnist(tmp_path, INFO)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("cut", [1, 100, 15_000])
def test_a_truncated_file_is_refused(tmp_path, zipped, cut):
    write_fashion_mnist(tmp_path)
    content = idx_bytes(fashion_arrays()[IMAGES])
    path = write(tmp_path, IMAGES, content[:-cut], zipped)
    with pytest.raises(DataError, match=f"{path.name} is truncated: .* needs 15,680 bytes"):
        read_fashion_mnist(tmp_path, INFO)


@pytest.mark.parametrize("length", [0, 3, 4, 15])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path, length):
    path = write(tmp_path, IMAGES, idx_bytes(fashion_arrays()[IMAGES])[:length])
    with pytest.raises(DataError, match=r"truncated: it ends in the header|it starts with"):
        read_idx(path, (100, 28, 28))


@pytest.mark.parametrize("cut", [1, 7, 500])
def test_a_truncated_gzip_file_is_refused(tmp_path, cut):
    write_fashion_mnist(tmp_path)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=f"{path.name} cannot be read; it is damaged or incomplete"):
        read_fashion_mnist(tmp_path, INFO)


@pytest.mark.parametrize("at", [12, 2000, -6])
def test_a_damaged_gzip_file_is_refused(tmp_path, at):
    write_fashion_mnist(tmp_path)
    path = tmp_path / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=path.name):
        read_fashion_mnist(tmp_path, INFO)


@pytest.mark.parametrize("magic", [b"\0\0\x08\x01", b"\0\0\x0d\x03", b"\x93NUM", b"<htm"])
def test_another_magic_is_refused(tmp_path, magic):
    write_fashion_mnist(tmp_path)
    content = idx_bytes(fashion_arrays()[IMAGES])
    path = write(tmp_path, IMAGES, magic + content[4:])
    message = f"{path.name} is not an IDX file.*starts with {magic.hex(' ')}, wanted 00 00 08 03"
    with pytest.raises(DataError, match=message):
        read_fashion_mnist(tmp_path, INFO)


@pytest.mark.parametrize("zipped", [True, False])
def test_bytes_behind_the_end_are_refused(tmp_path, zipped):
    write_fashion_mnist(tmp_path)
    content = idx_bytes(fashion_arrays()[LABELS]) + b"x"
    write(tmp_path, LABELS, content, zipped)
    with pytest.raises(DataError, match=r"more than the 20 bytes that shape \(20,\) needs"):
        read_fashion_mnist(tmp_path, INFO)


def test_a_header_that_announces_too_much_is_refused_before_reading(tmp_path):
    write_fashion_mnist(tmp_path)
    content = bytes([0, 0, 8, 3]) + np.array([2**31, 28, 28], dtype=">u4").tobytes()
    write(tmp_path, IMAGES, content)
    with pytest.raises(DataError, match=r"announces shape \(2147483648, 28, 28\), wanted at most"):
        read_fashion_mnist(tmp_path, INFO)


def test_more_images_than_the_set_has_are_refused(tmp_path):
    arrays = write_fashion_mnist(tmp_path, num_train=21)
    small = dataclasses.replace(INFO, num_train=20)
    with pytest.raises(DataError, match=r"announces shape \(21, 28, 28\), wanted at most \(20,"):
        read_fashion_mnist(tmp_path, small)
    assert len(arrays[IMAGES]) == 21


@pytest.mark.parametrize("shape", [(20, 27, 28), (20, 28, 14), (0, 28, 28)])
def test_images_of_another_size_are_refused(tmp_path, shape):
    write_fashion_mnist(tmp_path)
    write(tmp_path, IMAGES, idx_bytes(np.zeros(shape)))
    with pytest.raises(DataError, match=r"has images of shape .*wanted \(N, 28, 28\)"):
        read_fashion_mnist(tmp_path, INFO)


def test_labels_and_images_must_be_equally_many(tmp_path):
    write_fashion_mnist(tmp_path)
    write(tmp_path, LABELS, idx_bytes(np.zeros(19)))
    with pytest.raises(DataError, match=r"19 labels, .* 20 images"):
        read_fashion_mnist(tmp_path, INFO)


def test_a_label_out_of_range_is_refused(tmp_path):
    write_fashion_mnist(tmp_path)
    labels = np.zeros(20)
    labels[7] = 10
    path = write(tmp_path, LABELS, idx_bytes(labels))
    with pytest.raises(DataError, match=f"{path.name}: image 7 has label 10, wanted 0 to 9"):
        read_fashion_mnist(tmp_path, INFO)


def test_mnist_in_the_same_files_is_refused(tmp_path):
    arrays = write_fashion_mnist(tmp_path)
    mean = arrays[IMAGES].mean() / 255
    same = dataclasses.replace(INFO, num_train=20, mean=(mean,))
    assert len(read_fashion_mnist(tmp_path, same)[0]) == 20
    other = dataclasses.replace(same, mean=(mean - 0.02,))
    with pytest.raises(DataError, match=f"does not hold Fashion-MNIST: .* mean {mean:.4f}"):
        read_fashion_mnist(tmp_path, other)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, (10,))
