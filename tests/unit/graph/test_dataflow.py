"""A traced model: its operations in order, with kinds, shapes and multiply-adds."""

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.graph.dataflow import Kind, trace_dataflow
from tiny_models import conv_net

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
