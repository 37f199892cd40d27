"""The plain convs that replace a conv: by hand, and against what the layer computes."""

import numpy as np
import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.deploy.parts import (
    conv_weight,
    has_shifts,
    narrow,
    plan_parts,
    shifts_of,
    stencil_weight,
)

ALL = np.arange


def layer(kernel=1, shifts=(), closed=(), **settings):
    conv = sc.SelectConv2d(4, 6, kernel, bias=False, **settings)
    with torch.no_grad():
        for slot, shift in dict(shifts).items():
            conv.shift[slot] = torch.tensor(shift)
            conv.shifted[slot] = True
    conv.close(list(closed))
    return conv


def test_a_plain_conv_is_one_part():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    (part,) = plan_parts(conv, ALL(6), ALL(4), (8, 8))
    assert part.filters.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert part.slots.tolist() == part.sources.tolist() == [[0, 1], [2, 3]]
    assert not part.is_gathered
    assert (part.num_weights, part.num_stencil_weights) == (6 * 2 * 9, 0)
    assert torch.equal(conv_weight(part), conv.weight)


def test_a_group_without_filters_is_gone():
    conv = nn.Conv2d(4, 6, 1, groups=2)
    (part,) = plan_parts(conv, np.array([3, 5]), ALL(4), (8, 8), round_to=None)
    assert part.filters.tolist() == [[3, 5]]
    assert part.sources.tolist() == [[2, 3]]
    assert torch.equal(conv_weight(part), conv.weight[[3, 5]])


def test_copies_of_a_channel_add_up():
    conv = layer(closed=[1])
    conv.index.copy_(torch.tensor([2, 1, 2, 3]))
    (part,) = plan_parts(conv, ALL(6), ALL(4), (8, 8), round_to=None)
    assert part.sources.tolist() == [[2, 3]]
    assert part.is_gathered
    weight = conv_weight(part)
    torch.testing.assert_close(weight[:, 0], conv.weight[:, 0] + conv.weight[:, 2])
    torch.testing.assert_close(weight[:, 1], conv.weight[:, 3])


def test_channels_of_no_slot_weigh_nothing():
    conv = layer(closed=[0])
    (part,) = plan_parts(conv, ALL(6), ALL(4), (8, 8))  # a gather would not pay
    assert part.sources.tolist() == [[0, 1, 2, 3]]
    assert conv_weight(part)[:, 0].abs().sum() == 0


def test_a_layer_closed_entirely_reads_one_channel_with_weight_zero():
    (part,) = plan_parts(layer(closed=range(4)), ALL(6), np.array([2, 3]), (8, 8))
    assert part.sources.tolist() in ([[2]], [[2, 3]])
    assert not conv_weight(part).any()


def test_shifted_slots_are_a_part_that_a_depthwise_conv_shifts():
    conv = layer(shifts={1: (0.5, -2.0)})
    still, moved = plan_parts(conv, ALL(6), ALL(4), (8, 8), block=2)
    assert still.slots.tolist() == [[0, 2, 3]]
    assert still.sources.tolist() == [[0, 1, 2, 3]]  # joined: a multiple of the block
    assert still.reach == ()
    assert moved.slots.tolist() == moved.sources.tolist() == [[1, -1]]
    assert moved.reach == (1, 2)
    assert moved.num_weights == 6 * 2
    assert moved.num_stencil_weights == 2 * 15
    torch.testing.assert_close(conv_weight(moved)[:, 0], conv.weight[:, 1])
    assert not conv_weight(moved)[:, 1].any()


def test_a_conv_whose_slots_are_all_shifted_is_one_part():
    conv = layer(shifts={0: (0.5, 0.0), 2: (0.0, 1.0)}, closed=[1, 3])
    (part,) = plan_parts(conv, ALL(6), ALL(4), (8, 8), block=1)
    assert part.reach == (1, 1)
    assert part.sources.tolist() == [[0, 2]]


def test_has_shifts():
    assert has_shifts(layer(shifts={1: (0.5, 0.0)}))
    assert not has_shifts(layer(shifts={1: (0.5, 0.0)}, closed=[1]))
    assert not has_shifts(layer())
    assert not has_shifts(layer(reallocate=False))
    assert not has_shifts(nn.Conv2d(4, 6, 1))
    assert not has_shifts(None)


def test_a_stencil_is_the_bilinear_shift():
    # Slot 0 is shifted out of the frame: what fills up the block must not look at it.
    conv = layer(kernel=3, shifts={0: (40.0, 0.0), 1: (0.25, -1.0)})
    _, part = plan_parts(conv, ALL(6), ALL(4), (8, 8), block=8)
    want = torch.zeros(8, 1, 3, 3)
    want[0, 0, 1, 0], want[0, 0, 2, 0] = 0.75, 0.25  # output at p reads the input at p + b
    torch.testing.assert_close(stencil_weight(part), want)


def test_shifts_out_of_the_frame_are_gone():
    parts = plan_parts(layer(shifts={1: (0.0, 8.0)}), ALL(6), ALL(4), (8, 8))
    assert len(parts) == 1
    assert shifts_of(parts[0].conv)[1].tolist() == [0.0, 8.0]
    assert shifts_of(layer(reallocate=False)).tolist() == [[0.0, 0.0]] * 4


@pytest.mark.parametrize(
    ("wanted", "saved", "round_to", "read"),
    [
        ([1, 2], 10.0, 1, [1, 2]),
        ([1, 2], 0.1, 1, [0, 1, 2, 3, 4]),  # a gather costs more than it saves
        ([1, 2], 10.0, 3, [0, 1, 2]),
        ([1, 2], 10.0, 8, [0, 1, 2, 3, 4]),
        ([0, 1, 2, 3, 4], 10.0, 1, [0, 1, 2, 3, 4]),
    ],
)
def test_narrow(wanted, saved, round_to, read):
    assert narrow(ALL(5), np.array(wanted), saved, round_to).tolist() == read
