"""DenseNet: the paper's DenseNet-40, -100, -121, DenseNet-BC-190 and CondenseNet-182.

The paper's DenseNet-40 (0.21M) and DenseNet-100 have bottlenecks and no compression; they are not
the usual networks of these names. CondenseNet-182 is built as it is trained, with dense 1x1 convs,
which may later be condensed.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selectconv.checks import check_count
from selectconv.errors import BadValue
from selectconv.lab.zoo.blocks import ModelOptions, Network, build_stem, norm_relu_conv
from selectconv.lab.zoo.learned_group_conv import LearnedGroupConv2d


class DenseUnit(nn.Module):
    """A dense unit: 1x1 to `4 * growth_rate` channels, 3x3 to `growth_rate` new ones."""

    def __init__(
        self,
        in_channels: int,
        growth_rate: int,
        realloc: str | None,
        *,
        groups: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = 4 * growth_rate
        self.pointwise = norm_relu_conv(in_channels, width, 1, realloc=realloc, dropout=dropout)
        self.spatial = norm_relu_conv(width, growth_rate, 3, realloc=realloc, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """Append this unit's features to `x`."""
        return torch.cat([x, self.spatial(self.pointwise(x))], dim=1)


class DenseNet(Network):
    """DenseNet (supplement, "Architectures"), and what CondenseNet makes of it.

    Args:
        options: as for `create_model`.
        growth_rates: k of each block.
        units: dense units in each block.
        compression: theta; below 1 a 1x1 conv stands before the pooling between blocks.
        groups: of the 3x3 convs.
        dropout: rate of the dropout before the units' 1x1 convs.
        own_stem: the stem where `options` names none.
        stem_norm: BN and ReLU after the first conv of an "imagenet" stem.

    Raises:
        TypeError, ValueError: a size that is not a positive integer, or lists whose lengths differ.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        growth_rates: Sequence[int],
        units: Sequence[int],
        compression: float = 1.0,
        groups: int = 1,
        dropout: float = 0.0,
        own_stem: str = "cifar",
        stem_norm: bool = False,
    ) -> None:
        if not units or len(growth_rates) != len(units):
            raise BadValue(
                "`growth_rates` and `units` must be equally long and not empty, "
                f"got lengths {len(growth_rates)} and {len(units)}."
            )
        for growth_rate in growth_rates:
            check_count("growth_rate", growth_rate, 1)
        width = 2 * growth_rates[0]
        stem = build_stem(options.in_channels, width, options.stem or own_stem, norm=stem_norm)
        blocks = nn.Sequential()
        for number, (growth_rate, length) in enumerate(zip(growth_rates, units, strict=True)):
            block = nn.Sequential()
            for _ in range(check_count("units", length, 1)):
                block.append(
                    DenseUnit(width, growth_rate, options.realloc, groups=groups, dropout=dropout)
                )
                width += growth_rate
            if number < len(units) - 1:
                if compression < 1:
                    narrow = math.floor(width * compression)
                    block.append(norm_relu_conv(width, narrow, 1, realloc=options.realloc))
                    width = narrow
                block.append(nn.AvgPool2d(2))
            blocks.append(block)
        super().__init__(stem, blocks, width, options.num_classes)
        nn.init.zeros_(self.classifier.bias)


def densenet40(
    options: ModelOptions, *, growth_rate: int = 12, units: Sequence[int] = (6, 6, 6)
) -> DenseNet:
    """DenseNet-40 of the paper: k = 12, 6-6-6 dense units, no compression; 0.21M parameters."""
    return DenseNet(options, growth_rates=[growth_rate] * len(units), units=units)


def densenet100(
    options: ModelOptions, *, growth_rate: int = 12, units: Sequence[int] = (16, 16, 16)
) -> DenseNet:
    """DenseNet-100 of the paper: k = 12, 16-16-16 dense units, no compression; 1.00M parameters."""
    return DenseNet(options, growth_rates=[growth_rate] * len(units), units=units)


def densenet_bc190(
    options: ModelOptions, *, growth_rate: int = 40, units: Sequence[int] = (31, 31, 31)
) -> DenseNet:
    """DenseNet-BC-190: k = 40, 31-31-31 dense units, compression 0.5; 25.6M parameters."""
    return DenseNet(options, growth_rates=[growth_rate] * len(units), units=units, compression=0.5)


def densenet121(
    options: ModelOptions, *, growth_rate: int = 32, units: Sequence[int] = (6, 12, 24, 16)
) -> DenseNet:
    """DenseNet-121 for ImageNet: k = 32, 6-12-24-16 units, compression 0.5; 7.98M parameters."""
    # BN and ReLU after the first conv: here the paper follows "the original architectures", and the
    # original has them, as has torchvision's (7,978,856 parameters). The authors' code has an
    # ImageNet stem without them (7,978,728) but no DenseNet-121; both counts print as 7.98M.
    return DenseNet(
        options,
        growth_rates=[growth_rate] * len(units),
        units=units,
        compression=0.5,
        own_stem="imagenet",
        stem_norm=True,
    )


def condensenet182(
    options: ModelOptions,
    *,
    growth_rates: Sequence[int] = (12, 24, 48),
    units: Sequence[int] = (30, 30, 30),
    groups: int = 4,
    dropout: float = 0.1,
    condense_factor: int | None = None,
) -> DenseNet:
    """CondenseNet-182: k = 12-24-48, 30-30-30 units, 3x3 convs in 4 groups; 13.8M parameters.

    With a `condense_factor` (CondenseNet's is 4) its 1x1 convs learn `groups` groups and may be
    condensed to 1 / `condense_factor` of their weights: 4.22M parameters.
    """
    # No channel shuffle: CondenseNet needs one only after condensing, to bring the outputs of its
    # grouped 1x1 convs back into the order that they have while those are dense.
    model = DenseNet(
        options, growth_rates=growth_rates, units=units, groups=groups, dropout=dropout
    )
    if condense_factor is not None:
        if options.realloc is not None:
            raise BadValue(
                "`condense_factor` is for the plain network: learned groups and selective convs "
                "cannot be combined."
            )
        for unit in model.modules():
            if isinstance(unit, DenseUnit):
                conv = unit.pointwise.conv
                unit.pointwise.conv = LearnedGroupConv2d.from_conv(conv, groups, condense_factor)
    return model
