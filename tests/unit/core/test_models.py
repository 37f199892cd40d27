"""Models are taken out of what wraps them; what hides or shards its layers is refused."""

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.core.models import unwrap, unwrap_compiled
from tiny_models import conv_net, images

X = images()[0][:2]


def wrappers(model):
    compiled = torch.compile(model, backend="eager")
    return {
        "compiled": compiled,
        "parallel": nn.DataParallel(model),
        "compiled inside": nn.DataParallel(compiled),
        "compiled outside": torch.compile(nn.DataParallel(model), backend="eager"),
        "averaged": torch.optim.swa_utils.AveragedModel(model),
    }


@pytest.mark.parametrize("kind", wrappers(nn.ReLU()))
def test_count_and_compress_work_on_the_model_inside(kind):
    model = conv_net().eval()
    model.conv1.close([1, 2, 3])
    wrapped = wrappers(model)[kind].eval()
    assert kind == "averaged" or unwrap(wrapped) is model
    assert sc.count(wrapped, X) == sc.count(model, X)
    small = sc.compress(wrapped, X)
    torch.testing.assert_close(small(X), model(X), rtol=1e-4, atol=1e-5)
    assert list(small.state_dict()) == list(sc.compress(model, X).state_dict())


class Around(nn.Module):
    """A model of which a part is wrapped."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return 2 * self.part(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
def test_a_wrapped_part_is_counted_and_compressed_as_if_it_were_not(wrap):
    model = conv_net().eval()
    for layer in model.modules():
        if isinstance(layer, sc.SelectConv2d):
            layer.close(range(0, layer.in_channels, 2))
    bare, wrapped = Around(model), Around(wrap(model))
    assert sc.count(wrapped, X) == sc.count(bare, X)
    small = sc.compress(wrapped, X)
    torch.testing.assert_close(small(X), bare(X), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, sc.SelectConv2d) for module in small.modules())
    wanted = sum(value.numel() for value in sc.compress(bare, X).parameters())
    assert sum(value.numel() for value in small.parameters()) == wanted


def test_export_works_on_the_model_inside(tmp_path):
    sc.export_onnx(wrappers(conv_net())["compiled inside"], tmp_path / "model.onnx", X)
    assert (tmp_path / "model.onnx").exists()


CALLS = {
    "convert": lambda model: sc.convert(model, X),
    "count": lambda model: sc.count(model, X),
    "compress": lambda model: sc.compress(model, X),
    "export_onnx": lambda model: sc.export_onnx(model, "never.onnx", X),
    "describe": sc.describe,
    "ChannelAllocator": lambda model: sc.ChannelAllocator(model, total_epochs=2),
    "observe_damage": lambda model: sc.observe_damage(model, [X]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_scripted_models_are_refused(call):
    plain = conv_net(convert=False).eval()
    for model in (torch.jit.script(plain), torch.jit.trace(plain, X)):
        with pytest.raises(TypeError, match=r"`model` is scripted or traced by torch\.jit"):
            call(model)


class FSDPModule:
    """Named as what `fully_shard` puts among a module's bases."""


class FSDPSequential(FSDPModule, nn.Sequential):
    """As `fully_shard` names the class that it gives a module."""


class FullyShardedDataParallel(nn.Module):
    """Named as torch's wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shard", [FSDPSequential, FullyShardedDataParallel])
def test_sharded_models_are_refused(call, shard):
    for model in (shard(conv_net()), nn.Sequential(shard(conv_net()))):
        with pytest.raises(TypeError, match="`model` is sharded by FSDP, which is not supported"):
            call(model)


@pytest.mark.parametrize("take", [unwrap, unwrap_compiled])
def test_refuses_what_is_no_module(take):
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module, got list"):
        take([conv_net()])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_stays_plain_and_is_named():
    model = conv_net(convert=False)
    model.relu1 = torch.jit.script(model.relu1)
    sc.convert(model, X)
    assert isinstance(model.conv1, sc.SelectConv2d)
    for call in (sc.count, sc.compress):
        with pytest.raises(
            sc.CompressionError, match=r"`relu1` is scripted or traced by torch\.jit"
        ):
            call(model, X)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("call", [sc.count, sc.compress])
def test_old_style_weight_norms_are_named(norm, call):
    model = conv_net(convert=False)
    norm(model.stem)
    sc.convert(model, X)
    with pytest.raises(sc.CompressionError, match="`stem` has an old-style weight_norm or spectra"):
        call(model, X)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_new_style_weight_norms_work(norm):
    model = conv_net(convert=False).eval()
    getattr(nn.utils.parametrizations, norm)(model.stem)
    sc.convert(model, X)
    torch.testing.assert_close(sc.compress(model, X)(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_model_that_cannot_be_copied():
    model = conv_net()
    model.held = (step for step in range(3))
    with pytest.raises(sc.CompressionError, match="`model` cannot be copied: TypeError: cannot pi"):
        sc.count(model, X)
