"""CondenseNet-182 as it is trained: with dense 1x1 convs, which may later be condensed."""

from collections.abc import Sequence

from selectconv.zoo.densenet import DenseNet
from selectconv.zoo.registry import ModelOptions, register_model


@register_model
def condensenet182(
    options: ModelOptions,
    *,
    growth_rates: Sequence[int] = (12, 24, 48),
    units: Sequence[int] = (30, 30, 30),
    groups: int = 4,
    dropout: float = 0.1,
) -> DenseNet:
    """CondenseNet-182: k = 12-24-48, 30-30-30 units, 3x3 convs in 4 groups; 13.8M parameters."""
    # No channel shuffle: CondenseNet needs one only after condensing, to bring the outputs of its
    # grouped 1x1 convs back into the order that they have while those are dense.
    return DenseNet(options, growth_rates=growth_rates, units=units, groups=groups, dropout=dropout)
