"""Images in memory, and the fixed choice of a part of them."""

import dataclasses

import pytest
import torch

from selectconv.errors import DataError, SelectConvError
from selectconv.lab.data import DatasetInfo, ImageSet, dataset_info, subset_index
from selectconv.lab.data.image_set import check_labels

INFO = DatasetInfo("toy", "Toy", 10, (2, 4, 4), 5, 5, 1, True, (0.5, 0.5), (0.2, 0.2))


def uint8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


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


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_subset_of_an_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match=rf"`size` must be at (least|most) \d+.*got {size}"):
        subset_index(10, size)


def test_a_subset_of_no_integer_is_refused():
    with pytest.raises(TypeError, match=r"`size` must be an integer.*got 2\.5"):
        subset_index(10, 2.5)


def test_take_keeps_images_and_labels_together():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    part = ImageSet(images, torch.arange(5) * 10).take(torch.tensor([3, 1]))
    assert part.images.flatten().tolist() == [3, 1]
    assert part.labels.tolist() == [30, 10]
    assert len(part) == 2


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "`images` must be uint8.*32"),
        (uint8(2, 4, 4), torch.zeros(2, dtype=torch.int64), r"`images` must be.*\(2, 4, 4\)"),
        (uint8(2, 1, 4, 4), torch.zeros(3, dtype=torch.int64), r"`labels` must be.*\(2,\).*\(3,\)"),
        (uint8(2, 1, 4, 4), torch.zeros(2), "`labels` must be int64.*float32"),
    ],
)
def test_an_image_set_of_wrong_tensors_is_refused(images, labels, message):
    with pytest.raises(ValueError, match=message):
        ImageSet(images, labels)


def test_labels_are_checked_and_the_first_wrong_one_is_named():
    check_labels(torch.tensor([0, 9]), 10, "somewhere")
    with pytest.raises(
        DataError, match=r"somewhere: image 1 has label 10, wanted 0 to 9; 2 labels"
    ):
        check_labels(torch.tensor([9, 10, 3, 255]), 10, "somewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": (0.5,)}, r"need 2 values, got \(0.5,\)"),
        ({"std": (0.1, 0.0)}, r"`std` must be positive, got \(0.1, 0.0\)"),
        ({"padding": -1}, "`padding` must be at least 0, got -1"),
    ],
)
def test_an_impossible_info_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(INFO, **change)


def test_an_info_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset_info("cifar10").padding = 0


def test_a_data_error_is_ours_and_a_runtime_error():
    assert issubclass(DataError, SelectConvError)
    assert issubclass(DataError, RuntimeError)
