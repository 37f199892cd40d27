"""A traced model: its operations in order, with kinds, shapes and multiply-adds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.graph.dataflow import Kind, trace_dataflow
from selectconv.graph.example import as_arguments, evaluating
from tiny_models import Net, conv_net

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_operations_in_order():
    model = conv_net()
    flow = trace_dataflow(model, X)
    rows = [(op.kind, op.shape) for op in flow.operations.values()]
    maps = (2, 12, 8, 8)
    assert rows == [
        (Kind.INPUT, (2, 3, 8, 8)), (Kind.CONV, maps), (Kind.NORM, maps),
        (Kind.CHANNELWISE, maps), (Kind.CONV, maps), (Kind.NORM, maps), (Kind.CHANNELWISE, maps),
        (Kind.CONV, maps), (Kind.CHANNELWISE, (2, 12, 1, 1)), (Kind.FLATTEN, (2, 12)),
        (Kind.LINEAR, (2, 4)), (Kind.OUTPUT, ()),
    ]  # fmt: skip
    macs = sum(op.macs for op in flow.operations.values())
    assert macs == 2 * (64 * (12 * 27 + 144 + 144 * 9) + 48)
    convs = [op.module for op in flow.operations.values() if op.kind is Kind.CONV]
    assert convs[1:] == [model.conv1, model.conv2]  # selective layers are the model's own
    assert convs[0] is not model.stem
    assert convs[0].weight is model.stem.weight
    assert next(iter(flow.operations.values())).channels == 3


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (nn.Conv2d(3, 4, 1), Kind.CONV),
        (nn.BatchNorm2d(3), Kind.NORM),
        (sc.SelectConv2d(3, 4, 1), Kind.CONV),
    ],
)
def test_a_layer_alone(model, kind):
    kinds = [op.kind for op in trace_dataflow(model, X).operations.values()]
    assert kinds[1] is kind


def test_errors_are_one_line_and_nothing_is_printed(capfd):
    with pytest.raises(sc.CompressionError, match="`example_input`: the model fails on it"):
        trace_dataflow(conv_net(), torch.zeros(1, 5, 8, 8))
    assert capfd.readouterr() == ("", "")
    with pytest.raises(TypeError, match=r"`example_input` does not fit.*'input'"):
        trace_dataflow(conv_net(), {"y": X})
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module, got list"):
        trace_dataflow([], X)


# How channels depend on each other, by operation; what is not exactly known is of kind OTHER.


MODULES = {
    "conv": nn.Conv2d(8, 6, 1), "linear": nn.Linear(8, 4), "norm": nn.BatchNorm2d(8),
    "blind": nn.BatchNorm2d(8, track_running_stats=False), "relu": nn.ReLU(),
    "prelu": nn.PReLU(8), "group": nn.GroupNorm(2, 8), "pool": nn.MaxPool2d(2),
    "select": sc.SelectConv2d(8, 6, 1), "sync": nn.SyncBatchNorm(8),
    "transposed": nn.ConvTranspose2d(8, 6, 2), "point": nn.AdaptiveAvgPool2d(1),
}  # fmt: skip


def traced(run):
    """The operations of `run`, in order, without the output."""
    net = Net(run, **MODULES)
    net.scale = nn.Parameter(torch.ones(8, 1, 1))
    net.row = nn.Parameter(torch.ones(6))
    return list(trace_dataflow(net, torch.zeros(2, 8, 6, 6)).operations.values())[:-1]


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda n, x: n.conv(x), Kind.CONV),
        (lambda n, x: n.select(x), Kind.CONV),
        (lambda n, x: n.conv(x[0]), Kind.OTHER),  # an image without its batch
        (lambda n, x: n.linear(x.mean((2, 3))), Kind.LINEAR),
        (lambda n, x: n.linear(x.transpose(1, 3)), Kind.OTHER),
        (lambda n, x: n.norm(x), Kind.NORM),
        (lambda n, x: n.sync(x), Kind.NORM),
        (lambda n, x: n.blind(x), Kind.OTHER),
        (lambda n, x: n.relu(x), Kind.CHANNELWISE),
        (lambda n, x: n.prelu(x), Kind.CHANNELWISE),
        (lambda n, x: n.pool(x), Kind.CHANNELWISE),
        (lambda n, x: n.group(x), Kind.NORM),
        (lambda n, x: n.transposed(x), Kind.TRANSPOSED),
        (lambda n, x: x.flatten(1), Kind.FLATTEN),
        (lambda n, x: x.view(x.size(0), -1), Kind.FLATTEN),
        (lambda n, x: x.flatten(2), Kind.OTHER),
        (lambda n, x: n.point(x).squeeze(3).squeeze(2), Kind.CHANNELWISE),
        (lambda n, x: x.transpose(1, 2), Kind.OTHER),
        (lambda n, x: F.silu(x), Kind.CHANNELWISE),
        (lambda n, x: x.contiguous(), Kind.CHANNELWISE),
        (lambda n, x: x.to(torch.float64), Kind.CHANNELWISE),
        (lambda n, x: x + x.mean((2, 3), keepdim=True), Kind.CHANNELWISE),
        (lambda n, x: x * n.scale, Kind.CHANNELWISE),
        (lambda n, x: x * n.row, Kind.CHANNELWISE),  # along the last axis
        (lambda n, x: x[0] + x, Kind.OTHER),  # only parameters (C, 1, 1) can be narrowed
        (lambda n, x: x.sum() * 2, Kind.OTHER),
        (lambda n, x: x.mean((2, 3)), Kind.CHANNELWISE),
        (lambda n, x: torch.mean(x, dim=-1), Kind.CHANNELWISE),
        (lambda n, x: x.mean(1), Kind.OTHER),
        (lambda n, x: x.mean(), Kind.OTHER),
        (lambda n, x: torch.cat([x, x], 1), Kind.CONCAT),
        (lambda n, x: torch.cat((x, x), dim=-3), Kind.CONCAT),
        (lambda n, x: torch.cat([x, x], axis=1), Kind.CONCAT),
        (lambda n, x: torch.cat([x, x]), Kind.OTHER),
        (lambda n, x: torch.cat([x, x], 2), Kind.OTHER),
        (lambda n, x: F.pad(x, (1, 1)), Kind.CHANNELWISE),
        (lambda n, x: F.pad(x, (0, 0, 0, 0, 1, 2)), Kind.CHANNEL_PAD),
        (lambda n, x: F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0), Kind.OTHER),
        (lambda n, x: F.pad(x, (0, 0, 0, 0, 1, -1)), Kind.OTHER),
        (lambda n, x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)), Kind.OTHER),
        (lambda n, x: x.size(2), Kind.SHAPE),
        (lambda n, x: x.size(1), Kind.OTHER),
        (lambda n, x: x.size(), Kind.OTHER),
        (lambda n, x: x.dim(), Kind.SHAPE),
        (lambda n, x: x.dtype, Kind.SHAPE),
        (lambda n, x: x.cumsum(1), Kind.OTHER),
    ],
)
def test_kinds(run, kind):
    assert traced(run)[-1].kind is kind


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda shape: shape[2], Kind.SHAPE),
        (lambda shape: shape[2:], Kind.SHAPE),
        (lambda shape: shape[1], Kind.OTHER),
        (lambda shape: shape[-1], Kind.SHAPE),
        (lambda shape: shape[-2:], Kind.SHAPE),
        (lambda shape: shape[-3], Kind.OTHER),
        (lambda shape: shape[::-1], Kind.OTHER),
    ],
)
def test_shapes_that_are_read_in_part(read, kind):
    (shape,) = (op for op in traced(lambda n, x: read(x.shape)) if op.node.target is getattr)
    assert shape.kind is kind


# Examples as arguments, and evaluation mode for a while.


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        (ONE, ((ONE,), {})),
        ((ONE, 2), ((ONE, 2), {})),
        ([ONE], ((ONE,), {})),
        ({"x": ONE}, ((), {"x": ONE})),
    ],
)
def test_arguments(example, arguments):
    assert as_arguments(example) == arguments


class Own:
    """What a model may take besides tensors."""


OWN = Own()


def test_objects_of_a_models_own_are_arguments():
    assert as_arguments(OWN) == ((OWN,), {})
    assert as_arguments((None, OWN)) == ((None, OWN), {})


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "got None"),
        (3, "got 3"),
        ("x", "got 'x'"),
        ((), r"got \(\)"),
        ({"x": 3}, "got {'x': 3}"),
        ((1, 3, 16, 16), r"got \(1, 3, 16, 16\); .* a shape torch.zeros"),
        ((np.zeros((1, 3)),), r"got \(array.*; for an array .*torch.from_numpy"),
    ],
)
def test_what_is_no_example(example, message):
    with pytest.raises(TypeError, match=rf"`example_input`.*{message}"):
        as_arguments(example)


def test_flags_come_back_also_after_an_error():
    class Stubborn(nn.Dropout):
        def train(self, mode=True):
            return self  # as models do that hold their batch norms fixed

    model = nn.Sequential(Stubborn(), nn.ReLU().eval())

    def fail():
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
