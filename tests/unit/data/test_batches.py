"""Who gets which images of an epoch, and what an epoch draws."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selectconv.lab.data.serve.batches import BatchPlan, draw_epoch, epoch_generator


def positions(**options):
    return [list(range(start, stop)) for start, stop in BatchPlan(**options)]


def test_one_process_gets_everything_in_order():
    assert positions(num_images=7, batch_size=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert positions(num_images=6, batch_size=3) == [[0, 1, 2], [3, 4, 5]]


def test_two_ranks_share_each_batch():
    first, second = (
        positions(num_images=11, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)
    )
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [6, 7], [10]]


def test_a_rest_smaller_than_the_ranks_is_left_out_in_training_only():
    options = {"num_images": 9, "batch_size": 2, "world_size": 4}
    assert [len(BatchPlan(rank=rank, **options)) for rank in range(4)] == [1, 1, 1, 1]
    test = [BatchPlan(rank=rank, in_step=False, **options) for rank in range(4)]
    assert [list(plan)[1:] for plan in test] == [[(8, 9)], [], [], []]


@given(
    num_images=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
)
def test_ranks_together_see_what_one_process_sees(num_images, batch_size, world_size):
    whole = batch_size * world_size
    one = positions(num_images=num_images, batch_size=whole, in_step=False)
    plans = [
        BatchPlan(num_images, batch_size, rank, world_size, in_step=False)
        for rank in range(world_size)
    ]
    shares = [[list(range(*span)) for span in plan] for plan in plans]
    for plan, share in zip(plans, shares, strict=True):
        assert len(plan) == len(share)
        assert all(share)
    for number, batch in enumerate(one):
        parts = [share[number] for share in shares if number < len(share)]
        assert list(chain(*parts)) == batch
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(num_images=st.integers(4, 60), batch_size=st.integers(1, 7), world_size=st.integers(1, 4))
def test_ranks_take_the_same_number_of_training_steps(num_images, batch_size, world_size):
    plans = [BatchPlan(num_images, batch_size, rank, world_size) for rank in range(world_size)]
    assert len({len(plan) for plan in plans}) == 1
    assert sum(1 for _ in plans[-1]) == len(plans[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_images": 0}, "`num_images` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"world_size": 0}, "`world_size` must be at least 1, got 0"),
        ({"rank": -1}, "`rank` must be at least 0, got -1"),
        ({"rank": 2, "world_size": 2}, "`rank` must be less than 2, got 2"),
        ({"num_images": 3, "world_size": 4}, "3 images give no batch of 5 for each of 4 proc"),
    ],
)
def test_wrong_plans_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BatchPlan(**{"num_images": 10, "batch_size": 5, **options})


def test_neighbouring_seeds_and_epochs_share_nothing():
    draws = {
        (seed, epoch): torch.rand(4, generator=epoch_generator(seed, epoch)).tolist()
        for seed in range(5)
        for epoch in range(5)
    }
    assert len({tuple(draw) for draw in draws.values()}) == 25
    assert draws[1, 2] == torch.rand(4, generator=epoch_generator(1, 2)).tolist()


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1)])
def test_negative_seeds_and_epochs_are_refused(seed, epoch):
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        epoch_generator(seed, epoch)


def test_the_draws_of_an_epoch():
    order, top, left, mirrored = draw_epoch(5000, seed=1, epoch=2, padding=3, flip=True)
    assert sorted(order.tolist()) == list(range(5000))
    assert order.tolist() != list(range(5000))
    assert set(top.tolist()) == set(left.tolist()) == set(range(7))
    assert mirrored.dtype == torch.bool
    assert not draw_epoch(5000, seed=1, epoch=2, padding=3, flip=False)[3].any()
    assert draw_epoch(50, seed=1, epoch=2, padding=0, flip=True)[1].max() == 0
