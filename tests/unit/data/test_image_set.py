"""Images in memory, the fixed choice of a part of them, and smaller images."""

import pytest
import torch

from selectconv.lab.data import ImageSet, dataset_info, load_dataset, subset_index


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
    for n in (0, 4095, 4096, 4999):
        for y, x in ((0, 0), (1, 0), (1, 1)):
            mean = images[n, 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].float().mean()
            assert abs(float(small.images[n, 2, y, x]) - float(mean)) <= 0.5


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
