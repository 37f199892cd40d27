"""Which channels are kept, by hand: what only closed slots read is gone, through all operations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.deploy.layout import plan_layout
from selectconv.deploy.parts import narrow
from selectconv.graph.dataflow import trace_dataflow
from tiny_models import Net

X = torch.zeros(1, 3, 6, 6)


def kept(net, round_to=1):
    """The channels that each operation keeps, by the name of its node."""
    flow = trace_dataflow(net.eval(), X)
    layout = plan_layout(flow, round_to)
    return {node.name: channels.tolist() for node, channels in layout.kept.items()}


def select(inputs, outputs, closed, **settings):
    layer = sc.SelectConv2d(inputs, outputs, 1, **settings)
    layer.close(closed)
    return layer


def test_a_concatenation_and_padded_channels():
    def run(net, x):
        a, b = net.a(x), net.b(x)
        return net.last(F.pad(torch.cat([a, b], 1), (0, 0, 0, 0, 1, 2)))

    net = Net(run, a=nn.Conv2d(3, 2, 1), b=nn.Conv2d(3, 3, 1), last=select(8, 2, [0, 1, 3, 5, 7]))
    found = kept(net)  # of 8: a zero, two of a, three of b, two zeros
    assert found["x"] == [0, 1, 2]  # the signature stays
    assert found["a"] == found["b"] == [1]
    assert found["cat"] == [1, 3]
    assert found["pad"] == [2, 4, 6]


def test_a_piece_that_nobody_reads_is_gone():
    def run(net, x):
        return net.last(torch.cat([net.a(x), net.b(x)], 1))

    net = Net(run, a=nn.Conv2d(3, 2, 1), b=nn.Conv2d(3, 2, 1), last=select(4, 2, [0, 1]))
    found = kept(net)
    assert "a" not in found
    assert found["cat"] == [2, 3]


def test_what_two_read_is_kept_for_both():
    def run(net, x):
        y = net.a(x)
        return net.b(y) + net.c(y)

    net = Net(run, a=nn.Conv2d(3, 4, 1), b=select(4, 2, [0, 1]), c=select(4, 2, [0, 3]))
    assert kept(net)["a"] == [1, 2, 3]


def test_a_conv_that_is_called_twice_keeps_all_filters():
    def run(net, x):
        return net.last(net.a(net.b(x))) + net.last(net.a(net.a(net.b(x))))

    net = Net(run, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(3, 4, 1), last=select(4, 2, [0, 1, 2]))
    found = kept(net)
    assert found["a"] == [0, 1, 2, 3]


def test_groups_keep_equally_many():
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1, groups=2), select(6, 2, [0, 1, 3]))
    assert kept(net)["_1"] == [0, 2, 4, 5]  # the first group keeps one more than it must


def test_unknown_operations_keep_all():
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(2, 6), select(6, 2, [0, 1, 3]))
    found = kept(net)
    assert found["_0"] == found["_1"] == list(range(6))


@pytest.mark.parametrize(("round_to", "filters"), [(1, 3), (4, 4), (8, 6)])
def test_rounded_up_as_far_as_there_are_channels(round_to, filters):
    net = nn.Sequential(nn.Conv2d(3, 6, 1), select(6, 4, [0, 1, 3]))
    assert len(kept(net, round_to)["_0"]) == filters


@pytest.mark.parametrize(
    ("width", "round_to", "channels"),
    [(64, None, 8), (68, None, 5), (32, None, 5), (64, 1, 5), (12, 4, 8), (12, 16, 12)],
)
def test_depthwise_convs_keep_whole_blocks_of_channels(width, round_to, channels):
    net = nn.Sequential(
        nn.Conv2d(3, width, 1),
        nn.Conv2d(width, width, 3, groups=width),
        select(width, 4, range(width - 5)),
    )
    found = kept(net, round_to)
    assert len(found["_1"]) == len(found["_0"]) == channels
    assert set(found["_1"]) >= set(range(width - 5, width))


@pytest.mark.parametrize(
    ("head", "round_to", "channels"), [(1000, None, 8), (10, None, 6), (1000, 1, 6), (10, 4, 8)]
)
def test_convs_that_join_shifted_channels_read_whole_blocks(head, round_to, channels):
    # Whole blocks add 7 x 4 weights: little beside a head of 4,000, much beside one of 40.
    layer = select(12, 4, range(6))
    with torch.no_grad():
        layer.shift[7] = 0.5
    layer.shifted[7] = True
    net = nn.Sequential(nn.Conv2d(3, 12, 1), layer, nn.Conv2d(4, head, 1))
    assert len(kept(net, round_to)["_0"]) == channels
    layer.shifted[7] = False
    assert len(kept(net, None)["_0"]) == 6


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
    assert narrow(np.arange(5), np.array(wanted), saved, round_to).tolist() == read


def test_a_parameter_is_narrowed_along_its_channels():
    net = Net(lambda net, x: net.last(net.scale * net.a(x).relu()), a=nn.Conv2d(3, 8, 1))
    net.scale, net.last = nn.Parameter(torch.ones(8, 1, 1)), select(8, 2, range(7))
    assert kept(net)["mul"] == [7]
    small = sc.compress(net, X)
    assert small.scale.shape == (1, 1, 1)
    assert sc.count(net, X) == sc.count(small, X)
