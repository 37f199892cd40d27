"""How channels depend on each other, by operation; what is not exactly known is of kind OTHER."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import selectconv as sc
from selectconv.graph.kinds import Kind, classify, shape_of
from selectconv.graph.tracer import module_of
from tiny_models import Net

MODULES = {
    "conv": nn.Conv2d(8, 6, 1), "linear": nn.Linear(8, 4), "norm": nn.BatchNorm2d(8),
    "blind": nn.BatchNorm2d(8, track_running_stats=False), "relu": nn.ReLU(),
    "prelu": nn.PReLU(8), "group": nn.GroupNorm(2, 8), "pool": nn.MaxPool2d(2),
    "select": sc.SelectConv2d(8, 6, 1), "sync": nn.SyncBatchNorm(8),
}  # fmt: skip


def traced(run):
    net = Net(run, **MODULES).eval()
    net.scale = nn.Parameter(torch.ones(8, 1, 1))
    net.row = nn.Parameter(torch.ones(6))
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda module, name: True
    module = fx.GraphModule(net, tracer.trace(net))
    ShapeProp(module).propagate(torch.zeros(2, 8, 6, 6))
    return module


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
        (lambda n, x: n.group(x), Kind.OTHER),
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
    module = traced(run)
    node = list(module.graph.nodes)[-2]
    assert classify(node, module_of(module, node)) is kind


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
    module = traced(lambda n, x: read(x.shape))
    (node,) = (node for node in module.graph.nodes if node.target is getattr)
    assert classify(node, None) is kind


def test_inputs_outputs_tensors_and_shapes():
    module = traced(lambda n, x: (x * n.scale).chunk(2, 1))
    kinds = {node.op: classify(node, None) for node in module.graph.nodes}
    assert kinds["placeholder"] is Kind.INPUT
    assert kinds["get_attr"] is Kind.TENSOR
    assert kinds["output"] is Kind.OUTPUT
    shapes = {node.name: shape_of(node) for node in module.graph.nodes}
    assert shapes["x"] == shapes["mul"] == (2, 8, 6, 6)
    assert shapes["chunk"] == ()  # several tensors
    assert shape_of(3) == ()
