"""Parameters and multiply-adds against numbers counted by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selectconv as sc
from selectconv.deploy.cost import count_macs, count_params
from selectconv.deploy.layout import plan_layout
from selectconv.deploy.parts import narrow
from selectconv.graph.dataflow import trace_dataflow
from tiny_models import Net, assert_same, snapshot


class Twice(nn.Module):
    """Runs one conv twice, on a tensor that it makes itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.conv(torch.zeros(1, 4, 5, 5))


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (nn.Conv2d(3, 8, 3), 8 * 3 * 9 + 8),
        (nn.Conv2d(8, 6, 3, groups=2, bias=False), 6 * 4 * 9),
        (nn.BatchNorm2d(5), 10),
        (nn.Linear(7, 3), 24),
        (nn.ReLU(), 0),
        (nn.Sequential(*[nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)] * 2), 16),
        (sc.SelectConv2d(8, 4, 1, bias=False), 8 * 4 + 2 * 8),
        (sc.SelectConv2d(8, 4, 1, bias=False, reallocate=False), 8 * 4),
    ],
)
def test_params_by_hand(model, params):
    assert count_params(model) == params


@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (3, 10, 6), 10 * 6 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3), (3, 10, 6), 8 * 4 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 10, 6), 5 * 3 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3, dilation=2), (3, 10, 6), 6 * 2 * 8 * 3 * 9),
        (nn.Conv2d(8, 12, 3, padding=1, groups=4), (8, 5, 5), 5 * 5 * 12 * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 5, 5), 5 * 5 * 8 * 9),
        (nn.Conv1d(3, 8, 3), (3, 10), 8 * 8 * 3 * 3),
        (nn.Conv3d(2, 4, 1), (2, 3, 4, 5), 60 * 4 * 2),
        (nn.Linear(64, 10), (64,), 640),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2)), (3, 8, 8), 0),
        (nn.Conv2d(3, 8, 1, dtype=torch.float64), (3, 4, 4), 16 * 8 * 3),
        (Twice(), (4, 5, 5), 2 * 25 * 16),
        # In training, batch norm refuses a single value per channel.
        (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).train(), (3, 1, 1), 24),
    ],
)
def test_macs_by_hand(model, shape, macs):
    assert count_macs(model, shape) == macs


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)).train()
    before = snapshot(model)
    assert count_macs(model, (3, 5, 5)) == 9 * 8 * 3 * 9
    assert all(module.training for module in model.modules())
    assert_same(snapshot(model), before)


def test_works_without_memory():
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6, bias=False)
    assert count_macs(huge, (10**6,)) == 10**12


PAPER = {  # parameters, multiply-adds and CondenseNet's count of the zoo, from the architecture
    "densenet40": (211_978, 71_334_240, 72_494_698),
    "densenet100": (995_698, 286_439_280, 291_505_018),
    "resnet164": (1_661_274, 239_258_112, 242_412_042),
}


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("name", PAPER)
def test_count_of_the_zoo(name, selective):
    cost = sc.count(sc.create_model(name, selective=selective), torch.zeros(1, 3, 32, 32))
    assert (cost.params, cost.macs, cost.macs_cn) == PAPER[name]


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        sc.SelectConv2d(8, 6, 1, bias=False),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )


def test_closed_slots_and_what_only_they_read_are_not_counted():
    model, x = chain(), torch.zeros(1, 3, 6, 6)
    dense = sc.count(model, x)
    assert dense.params == 8 * 27 + 8 + 16 + 48 + 275 == count_params(model) - 16  # the shifts
    assert dense.macs == 36 * (8 * 27 + 48) + 270
    assert dense.macs_cn == dense.macs + 5 + 36 * 8 + 36 * 6
    model[3].close([1, 2, 5])
    closed = sc.count(model, x)
    assert closed.params == 5 * 27 + 5 + 10 + 30 + 275
    assert closed.macs == 36 * (5 * 27 + 30) + 270
    assert closed.macs_cn == closed.macs + 5 + 36 * 5 + 36 * 6
    assert sc.count(model, x.expand(4, -1, -1, -1)).macs == 4 * closed.macs


class Forked(nn.Module):
    """Joins its input with one that a transposed conv enlarges, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.joined = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(torch.cat([self.up(self.coarse(x)), self.fine(x)], dim=1))


def test_a_branch_that_nobody_reads_costs_nothing():
    model, x = Forked(), torch.randn(1, 3, 6, 6)
    sc.convert(model, x)
    assert sc.count(model, x).macs == 36 * (24 + 64) + 9 * (96 + 8 * 8 * 4)
    model.joined.close(range(8))  # all that the transposed conv writes
    small = sc.compress(model, x)
    assert not hasattr(small, "up")
    assert sc.count(model, x) == sc.count(small, x)
    assert sc.count(model, x).macs == 36 * (24 + 32)


def test_a_counter_follows_the_allocation():
    model, x = chain(), torch.zeros(1, 3, 6, 6)
    counter = sc.CostCounter(model, x)
    for slots in ([], [0], [3, 4]):
        model[3].close(slots)
        assert counter.count() == sc.count(model, x)
    assert counter.count().macs == 36 * (5 * 27 + 30) + 270


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        ("net", torch.zeros(1, 3, 4, 4), TypeError, "`model` must be an nn.Module, got str"),
        (nn.Conv2d(3, 4, 1), torch.zeros(1, 2, 4, 4), ValueError, "`example_input`: the model"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Branching())),
            torch.zeros(1, 3, 4, 4),
            ValueError,
            r"`1\.0` \(Branching\) cannot be traced: .*masked, still works",
        ),
        (Branching(), torch.zeros(1, 3), ValueError, "`Branching` cannot be traced"),
        (Twice(), {"y": torch.zeros(1)}, TypeError, "`example_input` does not fit.*'x'"),
    ],
)
def test_count_refuses(model, example, error, message):
    with pytest.raises(error, match=message):
        sc.count(model, example)


# Which channels are kept, by hand: what only closed slots read is gone, through all operations.


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
@pytest.mark.parametrize("shift", [0.5, 1.0])
def test_convs_that_join_shifted_channels_read_whole_blocks(head, round_to, channels, shift):
    # Whole blocks add 7 x 4 weights: little beside a head of 4,000, much beside one of 40.
    layer = select(12, 4, range(6))
    layer.shift.detach()[7], layer.shifted[7] = shift, True
    net = nn.Sequential(nn.Conv2d(3, 12, 1), layer, nn.Conv2d(4, head, 1))
    assert len(kept(net, round_to)["_0"]) == channels
    layer.shifted[7] = False
    assert len(kept(net, None)["_0"]) == 6


@pytest.mark.parametrize(("inputs", "reads"), [(16, 16), (12, 12)])
def test_copies_fill_whole_blocks_as_far_as_the_conv_had_channels(inputs, reads):
    layer = select(inputs, 4, [inputs - 1])
    layer.shift.detach()[7], layer.shifted[7] = torch.tensor([1.0, 0.0]), True
    net = nn.Sequential(nn.Conv2d(3, inputs, 1), layer, nn.Conv2d(4, 1000, 1)).eval()
    assert sc.compress(net, X).get_submodule("1").in_channels == reads


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
