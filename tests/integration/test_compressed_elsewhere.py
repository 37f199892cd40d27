"""Compressed models can be traced, scripted, exported and quantized, as plain networks can."""

import pytest
import torch
from torch import Tensor, nn

import selectconv as sc
from scrambled import scramble
from tiny_models import conv_net

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
# int8 has 256 steps, of which a random net uses a part: 0.014 to 0.034 was measured.
INT8_TOLERANCE = 0.1

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.inner, self.inner_norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = x + torch.relu(self.inner_norm(self.inner(x)))
        return self.head(torch.cat([x, y], 1)).mean((2, 3))


def selective(name):
    if name == "densenet":
        options = {"selective": True, "realloc": "all"}
        model = sc.create_model("densenet40", growth_rate=4, units=(1, 1, 1), **options)
    else:
        model = sc.convert(Residual() if name == "residual" else conv_net(convert=False), X)
    return scramble(model, closed=0.4, moved=0.3)


def traced(model):
    return torch.jit.trace(model, X)


def scripted(model):
    return torch.jit.script(model)


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
    traced: 1e-5, scripted: 1e-5, exported: 1e-5, optimised: 1e-4, fx_quantized: INT8_TOLERANCE,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["sequential", "residual", "densenet"])
def test_a_compressed_model_goes_where_plain_ones_go(way, name):
    small = sc.compress(selective(name), X)
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

    small = sc.compress(selective(name), X)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        prepared = prepare_pt2e(exported(small), quantizer)
        prepared(X)
        want, got = small(X), convert_pt2e(prepared)(X)
    assert 0 < (got - want).abs().max() < INT8_TOLERANCE * want.abs().max()
