"""Graphs as plain data and back; what the table of operations does not have is refused by name."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.deploy.graph_description import describe_graph, rebuild_graph
from tiny_models import Net

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def arguments(net, x):
    y = net.conv(x)[..., 1:-1, ::2] * net.scale
    y = y.to(torch.float64).mean((2, 3), keepdim=True)
    z = torch.cat([y, y.flatten(1).view(y.shape[0], -1, 1, 1)], dim=1)
    return {"pair": (z, F.pad(z, (0, 1), value=2.0)), "list": [z.size(0), None, True, 0.5]}


def test_round_trip_through_json():
    net = Net(arguments, conv=nn.Conv2d(3, 4, 1))
    net.scale = nn.Parameter(torch.randn(4, 1, 1))
    small = sc.compress(net, X)
    description = json.loads(json.dumps(describe_graph(small)))
    assert description["modules"]["conv"][0] == "Conv2d"
    assert description["parameters"] == ["conv.bias", "conv.weight", "scale"]
    again = rebuild_graph(description, dict(small.state_dict()))
    assert isinstance(again.scale, nn.Parameter)
    assert again.conv.weight.is_meta  # the weights follow
    again.load_state_dict(small.state_dict(), assign=True)
    want, got = small(X), again(X)
    assert torch.equal(got["pair"][0], want["pair"][0])
    assert torch.equal(got["pair"][1], want["pair"][1])
    assert got["list"] == want["list"] == [2, None, True, 0.5]
    assert describe_graph(again) == describe_graph(small)


def test_refuses_arguments_that_are_not_plain():
    small = torch.fx.symbolic_trace(Net(lambda net, x: torch.sum(x)))
    (node,) = small.graph.find_nodes(op="call_function", target=torch.sum)
    node.args = (*node.args, {1, 2})
    with pytest.raises(sc.CompressionError, match=r"argument \{1, 2\} cannot be described"):
        describe_graph(small)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (["call_function", "y", "builtins.eval", [], {"dict": {}}], "function, 'builtins.eval'"),
        (["call_function", "y", "torch.new_empty", [], {"dict": {}}], "an unknown function"),
        (["call_method", "y", "fill_", [], {"dict": {}}], "unknown method, 'fill_'"),
        (["call_module", "y", "none", [], {"dict": {}}], "calls 'none', which it does not define"),
        (["get_attr", "y", "none", [], {"dict": {}}], "reads 'none', which has no weights"),
        (["call_function", "y", "getattr", [1, "data"], {"dict": {}}], "the attribute 'data'"),
        (["placeholder", "y", "y=1", [], {"dict": {}}], "'y=1' in place of a name"),
        (["call_method", "y", "add", [{"dtype": "nn"}], {"dict": {}}], "kind of value, 'dtype'"),
    ],
)
def test_refuses_what_is_not_in_the_table(step, message):
    with pytest.raises(sc.CompressionError, match=message):
        rebuild_graph({"modules": {}, "parameters": [], "steps": [step]}, {})
