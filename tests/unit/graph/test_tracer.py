"""The tracer sees writes in place, stops at whole modules, and says where it failed."""

import operator

import pytest
import torch
from torch import nn

from selectconv.graph.tracer import Tracer, first_line, module_of
from tiny_models import Net


def targets(net, is_leaf=lambda module: False):
    return [node.target for node in Tracer(is_leaf, {}).trace(net).nodes]


def test_records_writes_in_place():
    def run(net, x):
        y = x
        x += 1
        x[:, 0] = 2.0
        x //= 3
        return x * y

    assert targets(Net(run)) == [
        "x", operator.iadd, operator.setitem, operator.ifloordiv, operator.mul, "output",
    ]  # fmt: skip


def test_stops_at_whole_modules():
    inner = Net(lambda net, x: net.relu(x), relu=nn.ReLU())
    net = Net(lambda net, x: net.inner(x), inner=inner)
    assert targets(net) == ["x", "inner.relu", "output"]
    assert targets(net, lambda module: module is inner) == ["x", "inner", "output"]


def test_says_where_it_failed():
    odd = Net(lambda net, x: x if x.sum() > 0 else -x)
    tracer = Tracer(lambda module: False, {})
    with pytest.raises(Exception, match="symbolically traced") as caught:
        tracer.trace(nn.Sequential(nn.ReLU(), nn.Sequential(odd)))
    assert tracer.inside == ["1", "1.0"]
    assert first_line(caught.value).startswith("TraceError: symbolically traced")
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"


def test_module_of_a_step():
    net = nn.Sequential(nn.ReLU())
    x, relu, _ = torch.fx.symbolic_trace(net).graph.nodes
    assert module_of(net, relu) is net[0]
    assert module_of(net, x) is None
