"""Smaller images of a data set."""

import pytest
import torch

from selectconv.lab.data.image_set import ImageSet
from selectconv.lab.data.image_size import shrink_images
from selectconv.lab.data.registry import dataset_info, load_dataset
from selectconv.lab.train.config import resolve
from selectconv.lab.train.network import build_model


def test_pixels_are_means_of_what_they_cover():
    images = torch.randint(256, (5000, 3, 4, 8), dtype=torch.uint8)  # more than are shrunk at once
    small = shrink_images(ImageSet(images[..., :4], torch.arange(5000)), 2)
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
        ("cifar10", 15, "`image_size` must divide 32, the size of cifar10's images; got 15"),
        ("cifar10", 64, "must divide 32"),
        ("cifar10", 0, "`image_size` must be at least 1"),
        ("imagenet", 112, "imagenet's are cropped to 224"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, size, message):
    with pytest.raises(ValueError, match=message):
        dataset_info(name, size)


def test_model_options_reach_the_network():
    config = resolve({"data": "digits", "model_options": {"growth_rate": 4, "units": [1]}})
    model = build_model(config, dataset_info("digits"))
    assert model.classifier.in_features == 12
    with pytest.raises(TypeError, match="`densenet40` has no argument 'depth'"):
        build_model(
            resolve({"data": "digits", "model_options": {"depth": 1}}), dataset_info("digits")
        )
    with pytest.raises(TypeError, match="`model_options` must be a mapping"):
        resolve({"model_options": "growth_rate"})
