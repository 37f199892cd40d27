"""CondenseNet-182 as it is trained: with dense 1x1 convs, which may later be condensed."""

from collections.abc import Sequence

from selectconv.lab.zoo.densenet import DenseNet, DenseUnit
from selectconv.lab.zoo.learned_group_conv import LearnedGroupConv2d
from selectconv.lab.zoo.registry import ModelOptions, register_model


@register_model
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
        if options.selection is not None:
            raise ValueError(
                "`condense_factor` is for the plain network: learned groups and selective convs "
                "cannot be combined."
            )
        for unit in model.modules():
            if isinstance(unit, DenseUnit):
                conv = unit.pointwise.conv
                unit.pointwise.conv = LearnedGroupConv2d.from_conv(conv, groups, condense_factor)
    return model
