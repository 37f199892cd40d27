"""ONNX files agree with PyTorch, hold standard operators only, and appear whole or not at all."""

import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import selectconv as sc
from scrambled import Magnified, scramble
from selectconv.deploy import onnx as export
from selectconv.deploy.onnx import open_session
from tiny_models import Net, conv_net

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: scramble(
            sc.create_model("densenet40", selective=True, growth_rate=8, units=(3, 1)), closed=0.6
        ),
        lambda: sc.compress(
            scramble(
                sc.create_model(
                    "resnext29",
                    selective=True,
                    realloc="all",
                    width=4,
                    blocks=(1, 1),
                    cardinality=4,
                )
            ),
            X,
        ),
    ],
)
def test_agrees_with_pytorch(build, tmp_path):
    model, path = build(), tmp_path / "model.onnx"
    was = [module.training for module in model.modules()]
    sc.export_onnx(model, path, X)
    assert [module.training for module in model.modules()] == was
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    run = open_session(path)
    for batch in (1, 3):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(run(x)[0], model(x).detach(), rtol=1e-3, atol=1e-3)
    proto = onnx.load(path)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    operators = {node.op_type for node in proto.graph.node}
    assert operators.isdisjoint({"ScatterND", "GatherND"})
    assert "Pad" in operators  # whole pixels: a copy


def test_a_network_that_magnifies_rounding_is_exported_with_a_warning(tmp_path):
    torch.manual_seed(0)
    model, path = Magnified().eval(), tmp_path / "m.onnx"
    compressed = pytest.warns(sc.SelectConvWarning, match="compressed .* as much from float64")
    exported = pytest.warns(sc.SelectConvWarning, match="onnxruntime.* as much from float64")
    with compressed, exported:
        sc.export_onnx(model, path, torch.randn(2, 3, 8, 8))
    assert path.exists()


def test_a_plain_model_that_cannot_be_traced(tmp_path):
    def run(net, x):
        return net.conv(torch.where(x.sum() > 0, x, -x) if isinstance(x, torch.Tensor) else None)

    sc.export_onnx(Net(run, conv=nn.Conv2d(3, 2, 1)), tmp_path / "model.onnx", X)
    assert open_session(tmp_path / "model.onnx")(X)[0].shape == (1, 2, 8, 8)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_names_the_extra(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sc.ExportError, match=rf"needs {package}: pip install 'selectconv\[onnx\]'"):
        sc.export_onnx(conv_net(), tmp_path / "model.onnx", X)


@pytest.mark.parametrize("path", ["", "no/model.onnx"])
def test_refuses_a_path_that_cannot_be_written(path, tmp_path):
    with pytest.raises(sc.ExportError, match="cannot be written"):
        sc.export_onnx(conv_net(), tmp_path / path, X)


def test_refuses_a_selective_model_that_cannot_be_traced(tmp_path):
    def run(net, x):
        return net.conv(x) if x.sum() > 0 else x

    net = Net(run, conv=sc.SelectConv2d(3, 2, 1))
    with pytest.raises(sc.CompressionError, match="cannot be traced"):
        sc.export_onnx(net, tmp_path / "model.onnx", X)


def test_refuses_what_onnx_cannot_express(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(sc.ExportError, match="cannot be expressed in ONNX: no such operator"):
        sc.export_onnx(conv_net(), tmp_path / "model.onnx", X)
    assert list(tmp_path.iterdir()) == []


def test_writes_nothing_where_outputs_differ(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 2, 1))
    real = export.open_session
    monkeypatch.setattr(
        export, "open_session", lambda content: lambda *x: [y + 1 for y in real(content)(*x)]
    )
    with pytest.raises(sc.ExportError, match="output 0 in onnxruntime, for a batch of 1, differs"):
        sc.export_onnx(model, tmp_path / "model.onnx", X)
    assert list(tmp_path.iterdir()) == []


def test_a_size_among_the_outputs(tmp_path):
    def run(net, x):
        y = net.conv(x)
        return {"y": y, "images": y.shape[0]}

    model, path, x = (
        Net(run, conv=nn.Conv2d(3, 4, 1)).eval(),
        tmp_path / "m.onnx",
        torch.randn(2, 3, 4, 4),
    )
    sc.export_onnx(model, path, x)
    outputs = open_session(path)(x)
    torch.testing.assert_close(outputs[0], model(x)["y"], rtol=1e-4, atol=1e-5)
    assert int(outputs[1]) == 2


# Names and sizes


def run_unet(net, x):
    a = net.a(x).relu()
    b = net.b(F.max_pool2d(a, 2))
    y = net.c(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)).relu()
    # Values inside the graph are called relu and cat, and its input x.
    return OrderedDict({"relu": y, "cat": -a, "x": y.mean((2, 3)), "maps": [a, {"deep": b}]})


def unet():
    convs = {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1)}
    return scramble(sc.convert(Net(run_unet, **convs, c=nn.Conv2d(16, 8, 1)), X)).eval()


@pytest.mark.parametrize("dynamic", [None, "size"])
def test_outputs_keep_their_names_and_maps_may_have_any_size(dynamic, tmp_path):
    model, path = unet(), tmp_path / "m.onnx"
    sc.export_onnx(model, path, X, dynamic=dynamic)
    names = [value.name for value in onnx.load(path).graph.output]
    assert names == ["relu", "cat", "x_out", "maps.0", "maps.1.deep"]
    x = torch.randn(2, 3, *((8, 8) if dynamic is None else (6, 20)))
    with torch.no_grad():
        wanted = tree_leaves(model(x))
    for got, want in zip(open_session(path)(x), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def shifted_out_of_the_frame():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), sc.SelectConv2d(8, 4, 1))
    model[2].shift.data[0], model[2].shifted[0] = 9.0, True  # out of maps of 8 x 8
    return model


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 2)), "shapes"),
        (
            lambda: Net(
                lambda net, x: net.a(x if x.shape[-1] > 4 else -x), a=sc.SelectConv2d(3, 2, 1)
            ),
            "depends on shapes",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(4)), "output 0"),
        (shifted_out_of_the_frame, "output 0"),
    ],
    ids=["linear", "branch", "pool", "shift"],
)
def test_a_model_that_is_fixed_to_its_size_is_told(build, why, tmp_path):
    with pytest.raises(sc.ExportError, match=f"fixed to the size of `example_input`.*{why}"):
        sc.export_onnx(build(), tmp_path / "m.onnx", X, dynamic="size")
    assert list(tmp_path.iterdir()) == []


def test_refuses_what_cannot_be_dynamic(tmp_path):
    with pytest.raises(ValueError, match="`dynamic` must be one of size; got 'foo'"):
        sc.export_onnx(conv_net(), tmp_path / "m.onnx", X, dynamic="foo")
