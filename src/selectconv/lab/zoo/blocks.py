"""What the paper's networks share: stem, BN -> ReLU -> conv, head, initialisation."""

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selectconv.core.layer import SelectConv2d
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.paths import convolve_norm_relu, has_hooks


@dataclass(frozen=True)
class ModelOptions:
    """What `create_model` asks every builder for.

    Attributes:
        num_classes: outputs of the classifier.
        in_channels: channels of the images.
        stem: "cifar", "tiny" or "imagenet"; None: the model's own.
        realloc: which selective convs re-allocate, as for `create_model`; None: build a plain
            network.
    """

    num_classes: int
    in_channels: int
    stem: str | None
    realloc: str | None


class NormReluConv(nn.Sequential):
    """BN -> ReLU -> (dropout ->) conv; a selective conv takes all of it into one kernel.

    The kernel runs where it can and computes what the modules compute.
    """

    norm: nn.BatchNorm2d
    relu: nn.ReLU
    conv: nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, rectify, select and convolve."""
        conv, dropout = self.conv, getattr(self, "dropout", None)
        if (
            isinstance(conv, SelectConv2d)
            and isinstance(input, Tensor)  # a tracer passes proxies
            and type(self.relu) is nn.ReLU
            and not has_hooks(self.relu)
            and (dropout is None or not (dropout.training or has_hooks(dropout)))
        ):
            out = convolve_norm_relu(conv, input, self.norm)
            if out is not None:
                return out
        for module in self:
            input = module(input)
        return input


def norm_relu_conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    realloc: str | None,
    groups: int = 1,
    dropout: float = 0.0,
) -> NormReluConv:
    """Build BN -> ReLU -> (dropout ->) conv, the block in which Eq. (2) holds.

    Args:
        in_channels: inputs of the conv.
        out_channels: outputs of the conv.
        kernel_size: of the conv, which keeps the map's size.
        realloc: as in `ModelOptions`. A grouped conv is selective with "all" only: the authors
            left those of ResNeXt and CondenseNet plain.
        groups: of the conv.
        dropout: the rate; it keeps the mean of the conv's input, so Eq. (2) still holds.
    """
    norm = nn.BatchNorm2d(in_channels)
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        padding=kernel_size // 2,
        groups=groups,
        bias=False,
    )
    is_pointwise = kernel_size == 1
    is_chosen = is_pointwise if realloc == "pointwise-only" else groups == 1
    if realloc == "all" or (realloc is not None and is_chosen):
        reallocate = realloc == "all" or (realloc != "none" and is_pointwise)
        source = BatchNormMean(norm, torch.relu)
        conv = SelectConv2d.from_conv(conv, reallocate=reallocate, mean=source)
    layers = OrderedDict[str, nn.Module](norm=norm, relu=nn.ReLU(inplace=True))
    if dropout > 0:
        layers["dropout"] = nn.Dropout(dropout)
    return NormReluConv(OrderedDict(layers, conv=conv))


def build_stem(in_channels: int, width: int, stem: str, *, norm: bool = False) -> nn.Module:
    """Build the first conv, which is never selective: no BN and ReLU come before it.

    Args:
        in_channels: channels of the images.
        width: channels of the features.
        stem: "cifar", "tiny" or "imagenet", as for `create_model`.
        norm: put BN and ReLU between the conv and the pooling of the "imagenet" stem.
    """
    if stem == "imagenet":
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            *([nn.BatchNorm2d(width), nn.ReLU(inplace=True)] if norm else ()),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
    stride = 2 if stem == "tiny" else 1
    return nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)


class Network(nn.Module):
    """Stem, blocks, BN -> ReLU -> global average pooling, linear classifier.

    Args:
        stem: images to features.
        blocks: features to features.
        width: channels that the blocks end with.
        num_classes: outputs of the classifier.
    """

    def __init__(
        self, stem: nn.Module, blocks: nn.Sequential, width: int, num_classes: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = blocks
        self.head = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(width, num_classes)
        _initialize_convs(self)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (N, C, H, W)."""
        logits: Tensor = self.classifier(self.head(self.blocks(self.stem(x))))
        return logits


@torch.no_grad()
def _initialize_convs(model: nn.Module) -> None:
    """Draw the weights as the authors do: from N(0, 2 / (k^2 C_out)), whatever the groups."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels))
            module.weight.normal_(0, std)
            if isinstance(module, SelectConv2d):
                module.weight_std = std
