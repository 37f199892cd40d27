"""The table of operations: each stands once, is found under all its names, and all read it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import selectconv as sc
from selectconv.graph.operations import (
    TABLE,
    Family,
    family_of,
    find_module_row,
    find_row,
    functions_of,
)
from tiny_models import Net

ACTIVATIONS = [row for row in TABLE if row.family is Family.ACTIVATION]


def call(function, *args):
    graph = fx.Graph()
    return graph.call_function(function, (graph.placeholder("x"), *args))


def method(name, *args):
    graph = fx.Graph()
    return graph.call_method(name, (graph.placeholder("x"), *args))


def test_every_name_is_that_of_something_and_stands_once():
    names = [name for row in TABLE for name in row.names]
    assert len(names) == len(set(names))
    for row in TABLE:
        functions = functions_of(row)
        for name in row.names:
            homes = {name, f"torch.{name}", f"functional.{name}"}
            assert hasattr(torch.Tensor, name) or homes & set(functions), name
    modules = [module for row in TABLE for module in row.modules]
    assert len(modules) == len(set(modules)) == len({module.__name__ for module in modules})


@pytest.mark.parametrize(
    ("node", "family"),
    [
        (call(F.relu), Family.ACTIVATION),
        (call(torch.relu), Family.ACTIVATION),
        (call(torch.relu_), Family.ACTIVATION),
        (call(F.elu_), Family.ACTIVATION),
        (method("relu"), Family.ACTIVATION),
        (method("tanh_"), Family.ACTIVATION),
        (call(operator.add, 1), Family.ARITHMETIC),
        (method("add", 1), Family.ARITHMETIC),
        (method("add_", 1), None),
        (call(operator.iadd, 1), None),
        (method("squeeze_"), None),
        (call(torch.cat), Family.CONCAT),
        (call(operator.concat), None),
        (call(operator.getitem, 0), Family.REARRANGE),
        (call(torch.fft.fft2), None),
        (call(F.rrelu), None),
        (method("float"), Family.CAST),
        (method("logcumsumexp"), None),
        (fx.Graph().placeholder("relu"), None),
    ],
)
def test_functions_and_methods(node, family):
    assert family_of(node, None) is family


def test_modules_by_exact_type_or_by_package_and_name():
    class Swish(nn.Module):
        pass

    class Doubled(nn.BatchNorm2d):
        pass

    assert find_module_row(nn.SiLU()).family is Family.ACTIVATION
    assert find_module_row(Doubled(3)).family is None
    assert find_module_row(Swish()).family is None
    Swish.__module__ = "timm.layers.activations"
    assert find_module_row(Swish()) is find_module_row(nn.SiLU())


@pytest.mark.parametrize(
    "row", [row for row in ACTIVATIONS if row.names], ids=lambda row: row.names[0]
)
def test_an_activation_is_one_row_that_all_read(row, tmp_path):
    if row.gradient:
        gradient = row.function(torch.randn(3, requires_grad=True)).grad_fn.name()
        assert gradient.startswith(row.gradient)
    for run in (lambda net, x: row.function(x), lambda net, x: net.act(x)):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.BatchNorm2d(8),
            Net(run, act=row.modules[0]()),
            nn.Conv2d(8, 4, 1),
        ).eval()
        sc.convert(model)
        assert isinstance(model[3].mean_source, sc.BatchNormMean)
        model[3].close([1, 2])
        x = torch.randn(2, 3, 4, 4)
        small = sc.compress(model, x)
        assert small.get_submodule("0").out_channels == 6
        sc.save_compressed(small, tmp_path / "small")
        torch.testing.assert_close(sc.load_compressed(tmp_path / "small")(x), model(x))


def test_rows_of_pools_name_their_gradients():
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    for row, out in (
        (find_row(call(F.avg_pool2d), None), F.avg_pool2d(x, 2)),
        (find_row(call(F.max_pool2d), None), F.max_pool2d(x, 2)),
        (find_row(call(F.adaptive_avg_pool2d), None), F.adaptive_avg_pool2d(x, 2)),
        (find_row(method("mean"), None), x.mean((2, 3))),
    ):
        assert row.gradient in out.grad_fn.name()
