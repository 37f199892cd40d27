"""Pre-activation ResNet: ResNet-164 and ResNeXt-29 for CIFAR, ResNet-50 for ImageNet.

Differs from the originals as the paper does (supplement, "Architectures"): between stages the whole
trunk is average-pooled, and shortcuts that widen append zeros; there are no projections.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.checks import check_count
from selectconv.lab.zoo.blocks import ModelOptions, Network, build_stem, norm_relu_conv


class Bottleneck(nn.Module):
    """A residual block: 1x1 to `width` channels, 3x3, 1x1 to `out_channels`; zero-padded skip."""

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        realloc: str | None,
        *,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.reduce = norm_relu_conv(in_channels, width, 1, realloc=realloc)
        self.spatial = norm_relu_conv(width, width, 3, realloc=realloc, groups=groups)
        self.expand = norm_relu_conv(width, out_channels, 1, realloc=realloc)
        self.num_appended = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Add this block's features to `x`, which is widened with zeros where need be."""
        skip = F.pad(x, (0, 0, 0, 0, 0, self.num_appended)) if self.num_appended else x
        features: Tensor = self.expand(self.spatial(self.reduce(x)))
        return skip + features


class ResNet(Network):
    """Pre-activation bottleneck ResNet; with a cardinality above 1, ResNeXt.

    Stage i (from 0) works on `4 * width * 2^i` channels, with 3x3 convs of `cardinality` groups of
    `width * 2^i` channels.

    Args:
        options: as for `create_model`.
        width: channels after the stem.
        blocks: residual blocks in each stage.
        cardinality: groups of the 3x3 convs.
        own_stem: the stem where `options` names none.

    Raises:
        TypeError, ValueError: a size that is not a positive integer.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        width: int,
        blocks: Sequence[int],
        cardinality: int = 1,
        own_stem: str = "cifar",
    ) -> None:
        channels = check_count("width", width, 1)
        check_count("cardinality", cardinality, 1)
        stem = build_stem(options.in_channels, channels, options.stem or own_stem)
        stages = nn.Sequential()
        for number, length in enumerate(blocks):
            base = width * 2**number
            stage = nn.Sequential()
            for _ in range(check_count("blocks", length, 1)):
                inner, outer = cardinality * base, 4 * base
                stage.append(
                    Bottleneck(channels, inner, outer, options.realloc, groups=cardinality)
                )
                channels = outer
            if number < len(blocks) - 1:
                stage.append(nn.AvgPool2d(2))
            stages.append(stage)
        super().__init__(stem, stages, channels, options.num_classes)


def resnet164(
    options: ModelOptions, *, width: int = 16, blocks: Sequence[int] = (18, 18, 18)
) -> ResNet:
    """Pre-activation ResNet-164: 18-18-18 bottlenecks of width 16-32-64; 1.66M parameters."""
    return ResNet(options, width=width, blocks=blocks)


def resnet50(
    options: ModelOptions, *, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3)
) -> ResNet:
    """ResNet-50 for ImageNet: 3-4-6-3 pre-activation bottlenecks, no projections; 22.8M parameters.

    Its 22,780,456 parameters are what the paper prints (22.8M); with projections it would be 25.6M.
    """
    return ResNet(options, width=width, blocks=blocks, own_stem="imagenet")


def resnext29(
    options: ModelOptions,
    *,
    width: int = 64,
    blocks: Sequence[int] = (3, 3, 3),
    cardinality: int = 8,
) -> ResNet:
    """ResNeXt-29 (8x64d), pre-activation as in the authors' code; 33.8M parameters."""
    return ResNet(options, width=width, blocks=blocks, cardinality=cardinality)
