"""Networks of timm and torchvision for the tests: the smallest of each family, or a narrow one.

Both packages are needed by tests only; a missing one is a skip.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import nn

import torchvision_shim

CLASSES = 4


@dataclass(frozen=True)
class Architecture:
    """A network: how to build it with fresh weights, and the side of the images it is tried on."""

    package: str
    build: Callable[[], nn.Module]
    side: int = 32

    def create(self) -> nn.Module:
        torchvision_shim.install()  # a spawned process runs no conftest
        pytest.importorskip(self.package, reason=f"{self.package} is not installed")
        return self.build()


def timm_network(name: str, side: int = 32, **options: object) -> Architecture:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return Architecture("timm", build, side)


def _torchvision(name: str, side: int = 32, **options: object) -> Architecture:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options)

    return Architecture("torchvision", build, side)


def _narrow_resnet(**options: object) -> Architecture:
    def build() -> nn.Module:
        from torchvision.models.resnet import Bottleneck, ResNet

        return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, **options)

    return Architecture("torchvision", build, 64)


def _narrow_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), num_init_features=16, drop_rate=0.1, num_classes=CLASSES)


def _narrow_timm_densenet() -> nn.Module:
    from timm.models.densenet import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2, 2), num_classes=CLASSES)


ARCHITECTURES = {
    "residual": _torchvision("resnet18"),
    "residual, timm": timm_network("test_resnet", 64),
    "residual, grouped": _narrow_resnet(groups=8, width_per_group=4),
    "dense": Architecture("torchvision", _narrow_densenet),
    "dense, norms that activate": Architecture("timm", _narrow_timm_densenet),
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
