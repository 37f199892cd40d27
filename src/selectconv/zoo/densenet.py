"""DenseNet: the paper's DenseNet-40 (0.21M, bottleneck, no compression) and DenseNet-BC-190."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selectconv.layer import SelectConv2d
from selectconv.mean_source import BatchNormMean
from selectconv.zoo.registry import register_model


def norm_relu_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    realloc: str | None,
) -> nn.Sequential:
    """Build BN -> ReLU -> conv, the block in which Eq. (2) holds.

    Args:
        in_channels: inputs of the conv.
        out_channels: outputs of the conv.
        kernel_size: of the conv, which keeps the map's size.
        realloc: None builds a plain conv; else which selective convs re-allocate.
    """
    norm = nn.BatchNorm2d(in_channels)
    padding = kernel_size // 2
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, bias=False)
    if realloc is not None:
        reallocate = realloc == "all" or (realloc == "pointwise" and kernel_size == 1)
        source = BatchNormMean(norm, torch.relu)
        conv = SelectConv2d.from_conv(conv, reallocate=reallocate, mean=source)
    block = nn.Sequential()
    block.add_module("norm", norm)
    block.add_module("relu", nn.ReLU(inplace=True))
    block.add_module("conv", conv)
    return block


class DenseUnit(nn.Module):
    """A dense unit: 1x1 to `4 * growth_rate` channels, 3x3 to `growth_rate` new ones."""

    def __init__(self, in_channels: int, growth_rate: int, realloc: str | None) -> None:
        super().__init__()
        width = 4 * growth_rate
        self.pointwise = norm_relu_conv(in_channels, width, 1, realloc=realloc)
        self.spatial = norm_relu_conv(width, growth_rate, 3, realloc=realloc)

    def forward(self, x: Tensor) -> Tensor:
        """Append this unit's features to `x`."""
        return torch.cat([x, self.spatial(self.pointwise(x))], dim=1)


class DenseNet(nn.Module):
    """DenseNet (supplement B.3).

    Args:
        growth_rate: k.
        units: dense units in each block.
        compression: theta; below 1 a 1x1 conv stands before the pooling between blocks.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.
        stem: as for `create_model`; None: "cifar".
        realloc: None builds a plain network; else which selective convs re-allocate.
    """

    def __init__(
        self,
        growth_rate: int,
        units: Sequence[int],
        compression: float = 1.0,
        *,
        num_classes: int,
        in_channels: int,
        stem: str | None,
        realloc: str | None,
    ) -> None:
        super().__init__()
        width = 2 * growth_rate
        self.stem = _build_stem(in_channels, width, stem)
        self.blocks = nn.Sequential()
        for number, length in enumerate(units):
            block = nn.Sequential()
            for _ in range(length):
                block.append(DenseUnit(width, growth_rate, realloc))
                width += growth_rate
            if number < len(units) - 1:
                if compression < 1:
                    narrow = math.floor(width * compression)
                    block.append(norm_relu_conv(width, narrow, 1, realloc=realloc))
                    width = narrow
                block.append(nn.AvgPool2d(2))
            self.blocks.append(block)
        self.head = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(width, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (N, C, H, W)."""
        logits: Tensor = self.classifier(self.head(self.blocks(self.stem(x))))
        return logits


def _build_stem(in_channels: int, width: int, stem: str | None) -> nn.Module:
    if stem == "imagenet":
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
    stride = 2 if stem == "tiny" else 1
    return nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Initialise as the authors do: convs N(0, 2 / (k^2 C_out)), the classifier's bias 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels))
            module.weight.normal_(0, std)
            if isinstance(module, SelectConv2d):
                module.weight_std = std
        elif isinstance(module, nn.Linear):
            module.bias.zero_()


@register_model
def densenet40(
    *,
    num_classes: int,
    in_channels: int,
    stem: str | None,
    realloc: str | None,
    growth_rate: int = 12,
    units: Sequence[int] = (6, 6, 6),
) -> DenseNet:
    """DenseNet-40 of the paper: k = 12, 6-6-6 dense units, no compression; 0.21M parameters."""
    return DenseNet(
        growth_rate,
        units,
        num_classes=num_classes,
        in_channels=in_channels,
        stem=stem,
        realloc=realloc,
    )


@register_model
def densenet_bc190(
    *,
    num_classes: int,
    in_channels: int,
    stem: str | None,
    realloc: str | None,
    growth_rate: int = 40,
    units: Sequence[int] = (31, 31, 31),
) -> DenseNet:
    """DenseNet-BC-190: k = 40, 31-31-31 dense units, compression 0.5; 25.6M parameters."""
    return DenseNet(
        growth_rate,
        units,
        compression=0.5,
        num_classes=num_classes,
        in_channels=in_channels,
        stem=stem,
        realloc=realloc,
    )
