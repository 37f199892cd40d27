"""A file gives the model back, needs no code of it, and a damaged one is refused in one line."""

import copy
import json
import math
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import selectconv as sc
from compat import build_example
from scrambled import scramble
from selectconv.deploy.compressed_file import FORMAT, _digest
from tiny_models import Net, conv_net

FILES = Path(__file__).parents[2] / "support" / "files"
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return sc.compress(scramble(conv_net(), moved=0.2), X)


@pytest.fixture
def file(small, tmp_path):
    path = tmp_path / "small.safetensors"
    sc.save_compressed(small, path)
    return path


def parts(path):
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors, json.loads(opened.metadata()["selectconv"])


def rewrite(path, tensors, description):
    text = json.dumps(description)
    save_file(tensors, path, metadata={"selectconv": text, "sha256": _digest(text, tensors)})


def test_one_wrong_bit_is_refused(file):
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in (start, (start + len(whole)) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(sc.CompressionError, match="is damaged: it is not what was saved"):
            sc.load_compressed(file)
    file.write_bytes(whole)
    sc.load_compressed(file)


@pytest.mark.parametrize(
    "build",
    [
        lambda: conv_net(),
        lambda: nn.Sequential(OrderedDict({"block-0": nn.Conv2d(3, 8, 3), "b": conv_net(8)[1:2]})),
        lambda: sc.create_model("densenet40", selective=True, growth_rate=8, units=(3, 1, 1)),
        lambda: sc.create_model("resnet164", selective=True, width=8, blocks=(2, 1, 1)),
        lambda: sc.create_model("resnext29", selective=True, realloc="all", width=4, blocks=(1, 1)),
    ],
)
def test_round_trip(build, tmp_path):
    model = scramble(build(), closed=0.5)
    small = sc.compress(model, X)
    sc.save_compressed(small, tmp_path / "small.safetensors")
    again = sc.load_compressed(tmp_path / "small.safetensors")
    assert torch.equal(again(X), small(X))
    assert {name: tuple(value.shape) for name, value in again.named_parameters()} == {
        name: tuple(value.shape) for name, value in small.named_parameters()
    }
    assert not again.training
    sc.save_compressed(again, tmp_path / "again.safetensors")  # what was read can be written
    assert torch.equal(sc.load_compressed(tmp_path / "again.safetensors")(X), small(X))


def test_many_functions_and_modules_can_be_saved(tmp_path):
    def run(net, x):
        x = net.modules_(net.a(x))
        x = F.local_response_norm(F.glu(x, 1), 2) * math.sqrt(x.shape[0])
        largest, place = x.flatten(1).topk(4, dim=1)
        x = torch.lerp(x, F.softshrink(x), 0.3).sort(1).values
        x = (x - x.amin((2, 3), keepdim=True)) * torch.rsqrt(torch.var(x, 1, keepdim=True) + 1e-5)
        x = torch.addcmul(x, x, 1 / (x.norm(p=2, dim=(2, 3), keepdim=True) + 1e-5))  # ConvNeXt V2's
        return torch.where(x > 0.1, x.square(), x.amax(1, keepdim=True)), largest, place

    modules = nn.Sequential(
        nn.LocalResponseNorm(2, beta=0.5), nn.ConstantPad2d((1, 0, 2, 0), 0.5), nn.Hardshrink(0.1),
        nn.InstanceNorm2d(8, affine=True), nn.ConvTranspose2d(8, 8, 2), nn.LPPool2d(2, 2),
        nn.Threshold(-0.5, 0.1), nn.Softmin(1), nn.CircularPad2d(1),
    )  # fmt: skip
    small = sc.compress(Net(run, a=nn.Conv2d(3, 8, 1), modules_=modules), X)
    assert math.sqrt in {node.target for node in small.graph.nodes}
    sc.save_compressed(small, tmp_path / "file")
    assert all(map(torch.equal, sc.load_compressed(tmp_path / "file")(X), small(X)))


def test_all_kinds_of_arguments_can_be_saved(tmp_path):
    def run(net, x):
        y = net.conv(x)[..., 1:-1, ::2] * net.scale
        y = y.to(torch.float64).mean((2, 3), keepdim=True)
        z = torch.cat([y, y.flatten(1).view(y.shape[0], -1, 1, 1)], dim=1)
        pair = (z, F.pad(z, (0, 1), value=2.0))
        return OrderedDict({"pair '1'": pair, "list": [z.size(0), None, True, 0.5]})

    net = Net(run, conv=nn.Conv2d(3, 4, 1))
    net.scale = nn.Parameter(torch.randn(4, 1, 1))
    net.sizes, net.code, net.odd = [4, (0.5, "a")], "hides a model's own", object()
    small = sc.compress(net, X)
    sc.save_compressed(small, tmp_path / "file")
    again = sc.load_compressed(tmp_path / "file")
    assert isinstance(again.scale, nn.Parameter)
    wanted = net(X)
    for one in (small, again, copy.deepcopy(small), copy.deepcopy(again)):
        got = one(X)
        assert type(got) is OrderedDict
        assert all(map(torch.allclose, got.pop("pair '1'"), wanted["pair '1'"]))
        assert got == {"list": [2, None, True, 0.5]}
        assert one.sizes == [4, (0.5, "a")]
        assert "forward" in one.code
        assert not hasattr(one, "odd")


def test_refuses_keys_that_a_file_would_change(tmp_path):
    small = sc.compress(Net(lambda net, x: {7: net.a(x)}, a=nn.Conv2d(3, 8, 1)), X)
    with pytest.raises(sc.CompressionError, match="7: "):
        sc.save_compressed(small, tmp_path / "file")


def test_the_type_of_a_weight_can_be_saved(tmp_path):
    net = Net(lambda net, x: net.b(net.a(x).to(net.b.weight.dtype)), a=nn.Conv2d(3, 8, 1))
    net.b = sc.SelectConv2d(8, 4, 1)
    small = sc.compress(scramble(net), X)
    sc.save_compressed(small, tmp_path / "file")
    again = sc.load_compressed(tmp_path / "file")
    assert torch.equal(again(X), small(X))
    assert list(again.state_dict()) == list(small.state_dict())
    assert again.double()(X.double()).dtype == torch.float64


def test_loaded_weights_have_memory_of_their_own(file):
    # Parts of the file's memory begin anywhere, for which BLAS rounds in another order.
    state = sc.load_compressed(file).state_dict()
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    assert all(value.data_ptr() % 64 == 0 for value in state.values())


def test_settings_of_modules_come_back(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=2, dilation=2, padding_mode="reflect", bias=False),
        nn.BatchNorm2d(8, eps=0.1),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, padding="same", groups=4),
        nn.LeakyReLU(0.3),
        nn.GroupNorm(2, 8),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model(X)
    small = sc.compress(model.double(), X.double())
    sc.save_compressed(small, tmp_path / "file")
    assert torch.equal(sc.load_compressed(tmp_path / "file")(X.double()), small(X.double()))


def test_the_file_appears_whole_or_not_at_all(small, tmp_path, monkeypatch):
    path = tmp_path / "small.safetensors"
    path.write_text("what was there before")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(sc.CompressionError, match="cannot be written: No space left"):
        sc.save_compressed(small, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.safetensors"]
    assert path.read_text() == "what was there before"


def test_refuses_a_path_that_cannot_be_written(small, tmp_path):
    with pytest.raises(sc.CompressionError, match=r"no/file cannot be written: No such file"):
        sc.save_compressed(small, tmp_path / "no" / "file")


def test_refuses_what_is_not_compressed(tmp_path):
    with pytest.raises(TypeError, match=r"must be what sc\.compress returned, got Sequential"):
        sc.save_compressed(conv_net(), tmp_path / "file")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda net, x: torch.fft.fft2(net.a(x)).real,
            r"function `torch\.fft\.fft2` cannot be described",
        ),
        (lambda net, x: torch.logcumsumexp(net.a(x), 1), "`torch.logcumsumexp` cannot be"),
        (lambda net, x: net.a(x).logcumsumexp(1), "method 'logcumsumexp' cannot be described"),
        (lambda net, x: net.a(x).real, "attribute 'real' cannot be described"),
        (lambda net, x: net.odd(net.a(x)), "module `odd` of type RReLU cannot"),
    ],
)
def test_refuses_unknown_operations_by_name(run, message, tmp_path):
    net = Net(run, a=nn.Conv2d(3, 8, 1), odd=nn.RReLU())
    with pytest.raises(sc.CompressionError, match=message):
        sc.save_compressed(sc.compress(net, X), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def edit_step(place, value, op):
    def edit(tensors, description):
        step = next(step for step in description["steps"] if step[0] == op)
        step[place] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            (lambda t, d: t.pop("head.bias")),
            "does not match the weights.*Missing.*head.bias",
        ),
        ((lambda t, d: t.update(x=torch.ones(1))), 'Unexpected.*"x"'),
        (
            (lambda t, d: t.update({"head.bias": torch.ones(7)})),
            "size mismatch for head.bias",
        ),
        (edit_step(2, "os.system", "call_function"), "KeyError: 'os.system'"),
        (edit_step(2, "nothing", "call_module"), "KeyError: 'nothing'"),
        (edit_step(0, "exec", "call_module"), "KeyError: 'exec'"),
        (edit_step(2, "x=print(1)", "placeholder"), r"'x=print\(1\)' in place of a name"),
        (edit_step(2, "lambda", "placeholder"), "cannot be read, or does not match.*SyntaxError"),
        (edit_step(2, "1x", "placeholder"), "cannot be read, or does not match.*SyntaxError"),
        (edit_step(3, [{"node": "nobody"}], "call_module"), "cannot be read.*KeyError: 'nobody'"),
        (edit_step(4, {"dict": {"x=1": 1}}, "call_module"), "'x=1' in place of a name"),
        (edit_step(3, [{"dtype": "nn"}], "call_module"), "unknown value.*dtype"),
        (edit_step(3, [{"code": "1"}], "call_module"), "unknown value.*code"),
        (lambda t, d: d.update(format="other"), "the format 'other'"),
        (lambda t, d: d["modules"].update(stem=["Odd", {}]), "KeyError: 'Odd'"),
        (lambda t, d: d.pop("steps"), "cannot be read, or does not match the weights"),
    ],
)
def test_refuses_a_description_that_does_not_match(edit, message, file):
    tensors, description = parts(file)
    assert description["format"] == FORMAT
    edit(tensors, description)
    rewrite(file, tensors, description)
    with pytest.raises(sc.CompressionError, match=message) as caught:
        sc.load_compressed(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_attributes_and_methods_that_are_not_listed(tmp_path):
    def run(net, x):
        return net.a(x).view(x.shape[0], 8, -1)

    path = tmp_path / "file"
    sc.save_compressed(sc.compress(Net(run, a=nn.Conv2d(3, 8, 1)), X), path)
    for op, change, message in (
        ("call_method", lambda step: step.__setitem__(2, "__reduce__"), "__reduce__"),
        (
            "call_function",
            lambda step: step[3].__setitem__(1, "__class__"),
            "unknown attribute '__class__'",
        ),
    ):
        tensors, description = parts(path)
        change(next(step for step in description["steps"] if step[0] == op))
        rewrite(tmp_path / "odd", tensors, description)
        with pytest.raises(sc.CompressionError, match=message):
            sc.load_compressed(tmp_path / "odd")


def test_refuses_other_files(tmp_path, file):
    with pytest.raises(sc.CompressionError, match="gone is not a compressed model"):
        sc.load_compressed(tmp_path / "gone")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(sc.CompressionError, match="holds weights without a description"):
        sc.load_compressed(tmp_path / "weights")
    (tmp_path / "cut").write_bytes(file.read_bytes()[:200])
    with pytest.raises(sc.CompressionError, match="cut is not a compressed model"):
        sc.load_compressed(tmp_path / "cut")


def test_what_is_torchs_default_is_not_written(tmp_path):
    """A new argument of torch would keep older versions from reading the file."""
    sc.save_compressed(sc.compress(build_example()[0], X), tmp_path / "file")
    written = [settings["dict"] for _, settings in parts(tmp_path / "file")[1]["modules"].values()]
    assert {"num_features": 8} in written
    assert {"num_features": 8, "affine": False} in written
    assert {"num_groups": 2, "num_channels": 4, "affine": False} in written
    assert not any("inplace" in settings or settings.get("bias") for settings in written)


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("compressed_torch_*")), ids=lambda path: path.stem
)
def test_files_of_other_versions_of_torch(path):
    model, x = build_example()
    torch.testing.assert_close(sc.load_compressed(path)(x), model(x))


def test_a_file_of_an_earlier_commit():
    # Its shifted slots are a second conv, whose output is added. The numbers are that commit's.
    small = sc.load_compressed(FILES / "compressed_0.2_shifts.safetensors")
    y = small(torch.linspace(-1, 1, 384).view(2, 3, 8, 8))
    found = torch.cat([y.flatten()[:4], y.square().mean().view(1)])
    want = torch.tensor([-0.08210310, -0.06878521, -0.05491515, -0.05189612, 0.006431724])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
