"""How channels depend on each other, by operation; what is not exactly known is of kind OTHER."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.graph.dataflow import Kind, trace_dataflow
from tiny_models import Net

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
