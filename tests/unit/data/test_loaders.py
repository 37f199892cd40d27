"""Who gets which images of an epoch; batches on the device against a loop over images."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_files import assert_same_batches
from selectconv.lab.data import Batching, DatasetInfo, ImageSet, loaders, make_loader
from selectconv.lab.data.loaders import draw_epoch, epoch_generator

# x * a + b in float32 against (x / 255 - mean) / std in float64, for values up to 3.
TOLERANCE = 2e-6


def positions(num_images, *, train=True, **options):
    return [list(range(*span)) for span in Batching(train=train, **options).cut(num_images)]


def test_one_process_gets_everything_in_order():
    assert positions(7, batch_size=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert positions(6, batch_size=3) == [[0, 1, 2], [3, 4, 5]]


def test_a_rest_smaller_than_the_ranks_is_left_out_in_training_only():
    options = {"batch_size": 2, "world_size": 4}
    for rank in range(4):
        assert positions(9, rank=rank, **options) == [[2 * rank, 2 * rank + 1]]
        shares = positions(9, rank=rank, train=False, **options)
        assert shares[1:] == ([[8]] if rank == 0 else [])


@given(
    num_images=st.integers(4, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
)
def test_ranks_together_see_what_one_process_sees(num_images, batch_size, world_size):
    one = positions(num_images, batch_size=batch_size * world_size)
    options = [
        {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        for rank in range(world_size)
    ]
    shares = [positions(num_images, train=False, **each) for each in options]
    assert all(all(share) for share in shares)
    for number, batch in enumerate(one):
        parts = [share[number] for share in shares if number < len(share)]
        assert list(chain(*parts)) == batch
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    trained = [positions(num_images, **each) for each in options]
    assert len({len(share) for share in trained}) == 1
    assert trained == [tested[: len(trained[0])] for tested in shares]


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="3 images give no batch of 5 for each of 4 processes"):
        Batching(5, train=True, world_size=4).cut(3)


def test_neighbouring_seeds_and_epochs_share_nothing():
    draws = {
        (seed, epoch): torch.rand(4, generator=epoch_generator(seed, epoch)).tolist()
        for seed in range(5)
        for epoch in range(5)
    }
    assert len({tuple(draw) for draw in draws.values()}) == 25


def test_the_draws_of_an_epoch():
    order, top, left, mirrored = draw_epoch(5000, seed=1, epoch=2, padding=3, flip=True)
    assert sorted(order.tolist()) == list(range(5000))
    assert order.tolist() != list(range(5000))
    assert set(top.tolist()) == set(left.tolist()) == set(range(7))
    assert mirrored.dtype == torch.bool
    # Five standard deviations of 5000 fair coins.
    assert abs(mirrored.float().mean() - 0.5) < 5 * math.sqrt(0.25 / 5000)
    # Rows and columns are independent. Chi-squared, 48 degrees of freedom: above 95 once in 10,000.
    counts = torch.bincount(top * 7 + left, minlength=49)
    assert ((counts - 5000 / 49) ** 2 / (5000 / 49)).sum() < 95
    assert not draw_epoch(5000, seed=1, epoch=2, padding=3, flip=False)[3].any()
    assert draw_epoch(50, seed=1, epoch=2, padding=0, flip=True)[1].max() == 0


def make(count=23, shape=(3, 6, 5), padding=2, flip=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    channels = shape[0]
    info = DatasetInfo(
        name="toy",
        title="Toy",
        num_classes=10,
        shape=shape,
        num_train=count,
        num_test=count,
        padding=padding,
        flip=flip,
        mean=tuple(0.3 + 0.1 * channel for channel in range(channels)),
        std=tuple(0.2 + 0.05 * channel for channel in range(channels)),
    )
    # No zeros: the frame can be told from the image.
    images = torch.randint(1, 256, (count, *shape), generator=draw, dtype=torch.uint8)
    return ImageSet(images, torch.randint(10, (count,), generator=draw)), info


def augment(image, info, top, left, mirrored):
    """One image, pixel by pixel: frame of zeros, crop, mirror, normalise."""
    channels, height, width = info.shape
    result = np.zeros(info.shape)
    for channel in range(channels):
        for y in range(height):
            for x in range(width):
                source_y, source_x = y + top - info.padding, x + left - info.padding
                inside = 0 <= source_y < height and 0 <= source_x < width
                pixel = int(image[channel, source_y, source_x]) if inside else 0
                to = width - 1 - x if mirrored else x
                result[channel, y, to] = (pixel / 255 - info.mean[channel]) / info.std[channel]
    return torch.from_numpy(result)


def oracle(images, info, batch_size, seed, epoch):
    size = len(images)
    draws = draw_epoch(size, seed=seed, epoch=epoch, padding=info.padding, flip=info.flip)
    samples = list(zip(*(draw.tolist() for draw in draws), strict=True))
    for start in range(0, size, batch_size):
        batch = samples[start : start + batch_size]
        batch = [s for s in batch if not s[3]] + [s for s in batch if s[3]]
        pixels = [augment(images.images[index], info, *rest) for index, *rest in batch]
        yield torch.stack(pixels), torch.tensor([int(images.labels[s[0]]) for s in batch])


def load(images, info, batch_size=4, *, epoch=0, **options):
    options = {"train": True, "seed": 5, **options}
    loader = make_loader(images, info, Batching(batch_size, **options))
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader)
    assert loader.num_images == len(images)
    return batches


FORMATS = {False: torch.contiguous_format, True: torch.channels_last}
CASES = {
    "colour": {},
    "grey": {"shape": (1, 7, 7), "padding": 3},
    "wide": {"shape": (2, 3, 9), "padding": 1},
    "no flip": {"flip": False},
    "no padding": {"padding": 0},
    "neither": {"padding": 0, "flip": False},
    "padding beyond the image": {"shape": (1, 2, 2), "padding": 4},
    "one image": {"count": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_batches_are_those_of_a_loop_over_images(case, channels_last):
    images, info = make(**CASES[case])
    for epoch, size in ((0, 4), (3, 7)):
        found = load(images, info, size, epoch=epoch, channels_last=channels_last)
        wanted = list(oracle(images, info, size, 5, epoch))
        assert len(found) == len(wanted)
        for (batch, labels), (pixels, classes) in zip(found, wanted, strict=True):
            assert (batch.dtype, batch.shape) == (torch.float32, pixels.shape)
            assert batch.is_contiguous(memory_format=FORMATS[channels_last])
            assert (batch - pixels).abs().max() < TOLERANCE
            assert labels.tolist() == classes.tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_way_of_accelerators_gives_the_same(case, monkeypatch):
    images, info = make(**CASES[case])
    wanted = load(images, info)
    monkeypatch.setattr(loaders._FramedImages, "crop", loaders._FramedImages._gather)
    assert_same_batches(load(images, info), wanted)


def test_seed_and_epoch_decide_everything():
    images, info = make()
    torch.manual_seed(1)
    wanted = load(images, info)
    torch.manual_seed(2)
    assert_same_batches(load(images, info), wanted)
    for other in (load(images, info, seed=6), load(images, info, epoch=1)):
        assert not torch.equal(other[0][0], wanted[0][0])
        assert not torch.equal(torch.cat([y for _, y in other]), torch.cat([y for _, y in wanted]))


def test_epochs_can_be_taken_in_any_order_and_broken_off():
    images, info = make()
    loader = make_loader(images, info, Batching(4, train=True, seed=5))
    next(loader.epoch(7))
    first, second = loader.epoch(0), loader.epoch(1)
    interleaved = [batch for pair in zip(first, second, strict=True) for batch in pair]
    assert_same_batches(interleaved[::2], load(images, info, epoch=0))
    assert_same_batches(interleaved[1::2], load(images, info, epoch=1))


def test_the_global_random_state_and_the_threads_are_left_alone():
    images, info = make()
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    for train in (True, False):
        for _ in make_loader(images, info, Batching(4, train=train, seed=5)).epoch(0):
            assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before)


def by_image(batches):
    """A batch as a set: its images with their labels, in a fixed order."""
    return [
        sorted(
            (label, tuple(image.flatten().tolist())) for image, label in zip(*batch, strict=True)
        )
        for batch in ((images, labels.tolist()) for images, labels in batches)
    ]


@pytest.mark.parametrize("count", [24, 23, 21])
def test_two_ranks_see_together_what_one_process_sees(count):
    images, info = make(count=count)
    whole = by_image(load(images, info, 8))
    ranks = [load(images, info, 4, rank=rank, world_size=2) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == len(whole)
    together = [
        sorted(first + second)
        for first, second in zip(*(by_image(rank) for rank in ranks), strict=True)
    ]
    assert together == whole


def test_test_batches_are_plain_and_in_order():
    images, info = make(count=10)
    found = load(images, info, 4, train=False)
    assert [len(batch) for batch, _ in found] == [4, 4, 2]
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (info.mean, info.std))
    wanted = (images.images.double() / 255 - mean) / std
    assert (torch.cat([batch for batch, _ in found]) - wanted).abs().max() < TOLERANCE
    assert torch.equal(torch.cat([labels for _, labels in found]), images.labels)
    again = load(images, info, 4, train=False, epoch=3, seed=9, channels_last=True)
    assert_same_batches(again, found)
    assert again[0][0].is_contiguous(memory_format=torch.channels_last)
    assert load(images, info, 9, train=False, rank=10, world_size=11) == []


@pytest.mark.parametrize("train", [True, False])
def test_writing_into_a_batch_harms_nothing(train):
    images, info = make()
    loader = make_loader(images, info, Batching(4, train=train, seed=5))
    wanted = list(loader.epoch(0))
    for batch, labels in loader.epoch(0):
        batch.zero_()
        labels.zero_()
    assert_same_batches(list(loader.epoch(0)), wanted)


@pytest.mark.gpu
def test_another_device_sees_the_same_images():
    images, info = make()
    for (a, x), (b, y) in zip(load(images, info, device="cuda"), load(images, info), strict=True):
        assert a.device.type == "cuda"
        assert (a.cpu() - b).abs().max() < TOLERANCE
        assert torch.equal(x.cpu(), y)
