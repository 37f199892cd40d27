"""Other people's models, converted and compressed: same outputs."""

import pytest
import torch

import selectconv as sc
import torchvision_shim
from scrambled import scramble

QUICK = [
    "timm mobilenetv3_small_100",
    "timm tf_mobilenetv3_small_minimal_100",  # its Conv2dSame depends on shapes
    "torchvision shufflenet_v2_x0_5",
]
SLOW = [
    "timm densenet121",
    "timm resnet18",
    "timm resnetv2_50",
    "timm efficientnet_b0",
    "timm regnety_002",
    "timm resnext50_32x4d",
    "timm dla34",
    "torchvision densenet121",
    "torchvision mobilenet_v2",
    "torchvision vgg11_bn",
    "torchvision convnext_tiny",
]
MODELS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def build(name):
    torchvision_shim.install()
    library, model = name.split()
    if library == "timm":
        return pytest.importorskip("timm").create_model(model, num_classes=7)
    models = pytest.importorskip("torchvision.models")
    return models.get_model(model, weights=None, num_classes=7)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", MODELS)
def test_same_outputs(name):
    x = torch.randn(1, 3, 64, 64)
    model = build(name).eval()
    sc.convert(model, x, realloc="pointwise")
    scramble(model, closed=0.4, moved=0.2)
    small = sc.compress(model, x)
    wide = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want, got = model(wide), small(wide)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=float(1e-4 * want.abs().max()))
    cost = sc.count(model, x)
    assert cost.params == pytest.approx(sum(p.numel() for p in small.parameters()), rel=0.02)
    assert cost.params < sum(p.numel() for p in model.parameters())
