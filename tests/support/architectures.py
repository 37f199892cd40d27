"""Networks of timm and torchvision for the tests: the smallest of each family, or a narrow one.

Both packages are needed by tests only; a missing one is a skip.
"""

from dataclasses import dataclass, field
from importlib import import_module

import pytest
from torch import nn

import torchvision_shim

CLASSES = 4


@dataclass(frozen=True)
class Architecture:
    """A network: what builds it with fresh weights, and the side of the images it is tried on."""

    build: str  # module:function
    side: int = 32
    options: dict[str, object] = field(default_factory=dict)

    def create(self) -> nn.Module:
        torchvision_shim.install()  # a spawned process runs no conftest
        module, _, function = self.build.partition(":")
        package = module.partition(".")[0]
        pytest.importorskip(package, reason=f"{package} is not installed")
        return getattr(import_module(module), function)(num_classes=CLASSES, **self.options)


def timm_network(name: str, side: int = 32, **options: object) -> Architecture:
    return Architecture("timm:create_model", side, {"model_name": name, **options})


def _torchvision(name: str, side: int = 32, **options: object) -> Architecture:
    return Architecture(f"torchvision.models:{name}", side, options)


def narrow_resnet(num_classes: int) -> nn.Module:
    resnet = pytest.importorskip("torchvision.models.resnet")
    sizes = {"layers": [1, 1, 1, 1], "groups": 8, "width_per_group": 4}
    return resnet.ResNet(resnet.Bottleneck, num_classes=num_classes, **sizes)


_NARROW = {"growth_rate": 8, "block_config": (2, 2, 2)}
ARCHITECTURES = {
    "residual": _torchvision("resnet18"),
    "residual, timm": timm_network("test_resnet", 64),
    "residual, grouped": Architecture("architectures:narrow_resnet", 64),
    "dense": _torchvision("DenseNet", num_init_features=16, drop_rate=0.1, **_NARROW),
    "dense, norms that activate": Architecture("timm.models.densenet:DenseNet", options=_NARROW),
    "inception": _torchvision("googlenet", 64, aux_logits=False, init_weights=False),
    "fire modules without norms": _torchvision("squeezenet1_1", 64),
    "squeeze-excite": timm_network("regnety_002", 64),
    "grouped": timm_network("regnetx_002", 64),
    "depthwise": _torchvision("mobilenet_v2", width_mult=0.35),
    "depthwise, hard swish": timm_network("mobilenetv3_small_050", 64),
    "depthwise, SiLU, stochastic depth": timm_network("test_efficientnet", 64, drop_path_rate=0.2),
    "shuffle": _torchvision("shufflenet_v2_x0_5", 64),
    "high resolution": timm_network("hrnet_w18_small", 64),
    "RepVGG": timm_network("repvgg_a0"),
    "ConvNeXt": timm_network("convnext_atto", drop_path_rate=0.1),
    "aggregation": timm_network("dla46_c", 64),
    "ghost": timm_network("ghostnet_050", 64),
    "cross-stage partial": timm_network("test_byobnet", 64),
    "one-shot aggregation": timm_network("ese_vovnet19b_slim_dw", 64),
    "partial convs": timm_network("fasternet_t0", 64),
}
