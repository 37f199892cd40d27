"""ResNeXt-29 (8x64d): the ResNet of the paper with grouped 3x3 convs."""

from collections.abc import Sequence

from selectconv.lab.zoo.registry import ModelOptions, register_model
from selectconv.lab.zoo.resnet import ResNet


@register_model
def resnext29(
    options: ModelOptions,
    *,
    width: int = 64,
    blocks: Sequence[int] = (3, 3, 3),
    cardinality: int = 8,
) -> ResNet:
    """ResNeXt-29 (8x64d), pre-activation as in the authors' code; 33.8M parameters."""
    return ResNet(options, width=width, blocks=blocks, cardinality=cardinality)
