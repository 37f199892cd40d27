"""Compressed models can be traced, scripted, exported and quantized, as plain networks can."""

import pytest
import torch
from torch import nn

import selectconv as sc
from scrambled import scramble
from tiny_models import Net, conv_net

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
# int8 has 256 steps, of which a random net uses a part: 0.014 to 0.034 was measured.
INT8_TOLERANCE = 0.1

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def run_residual(net, x):
    x = torch.relu(net.norm(net.stem(x)))
    y = x + torch.relu(net.inner_norm(net.inner(x)))
    return net.head(torch.cat([x, y], 1)).mean((2, 3))


def residual():
    return Net(
        run_residual,
        stem=nn.Conv2d(3, 16, 3, padding=1),
        norm=nn.BatchNorm2d(16),
        inner=nn.Conv2d(16, 16, 3, padding=1),
        inner_norm=nn.BatchNorm2d(16),
        head=nn.Conv2d(32, 8, 1),
    )


NETWORKS = {
    "sequential": conv_net,
    "residual": lambda: sc.convert(residual(), X),
    "densenet": lambda: sc.create_model(
        "densenet40", growth_rate=4, units=(1, 1, 1), selective=True, realloc="all"
    ),
}


def compressed(name):
    return sc.compress(scramble(NETWORKS[name](), closed=0.4, moved=0.3), X)


def traced(model):
    return torch.jit.trace(model, X)


def exported(model):
    return torch.export.export(model, (X,)).module()


def optimised(model):
    return torch.jit.optimize_for_inference(torch.jit.script(model))


def fx_quantized(model):
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    mapping = get_default_qconfig_mapping("x86")
    prepared = prepare_fx(model, mapping, (X,))
    prepared(X)
    return convert_fx(prepared)


WAYS = {
    traced: 1e-5, torch.jit.script: 1e-5, exported: 1e-5, optimised: 1e-4,
    fx_quantized: INT8_TOLERANCE,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compressed_model_goes_where_plain_ones_go(way, name):
    small = compressed(name)
    want = small(X)
    with torch.no_grad():
        got = way(small)(X)
    assert (got - want).abs().max() < WAYS[way] * want.abs().max()


# Not the DenseNet, which takes a minute and whose plain twin is far from itself in 8 bits, too.
@pytest.mark.parametrize("name", ["sequential", "residual"])
def test_pt2e_quantization_takes_compressed_models(name):
    pytest.importorskip("torchao", reason="PT2E quantization is torchao's")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    small = compressed(name)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        prepared = prepare_pt2e(exported(small), quantizer)
        prepared(X)
        want, got = small(X), convert_pt2e(prepared)(X)
    assert 0 < (got - want).abs().max() < INT8_TOLERANCE * want.abs().max()
