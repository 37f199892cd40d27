"""Screen what the learnable shift is worth: train as usual, with one thing changed.

    python results/shift_variants.py frozen --config FILE.yaml --out FOLDER   # as for `train`

Variants: `frozen` keeps the shifts where they were drawn; `lr10` gives them ten times the learning
rate (their gradient is multiplied: the same for SGD); `whole` draws them on whole pixels, and lets
them learn from there. These are controls, not settings of the package.
"""

import sys
from typing import Any

from torch import Tensor, nn

from selectconv.allocate.param_groups import param_groups
from selectconv.cli.main import main
from selectconv.core import slots
from selectconv.core.models import selective_layers
from selectconv.train import loop

FACTORS = {"frozen": 0.0, "lr10": 10.0}
VARIANTS = (*FACTORS, "whole")


def scale_shift_gradients(factor: float) -> None:
    """Multiply the gradients of all shifts that are trained from now on."""

    def scaled(model: nn.Module, *decays: Any) -> list[dict[str, Any]]:
        for layer in selective_layers(model).values():
            if layer.shift is not None:
                layer.shift.register_hook(lambda grad: factor * grad)
        return param_groups(model, *decays)

    loop.param_groups = scaled  # type: ignore[attr-defined]


def draw_whole_pixels() -> None:
    """Round the shifts that are drawn from now on."""
    drawn = slots.draw_shift

    def rounded(*how: Any) -> Tensor:
        return drawn(*how).round()

    slots.draw_shift = rounded


if __name__ == "__main__":
    variant, *rest = sys.argv[1:] or [""]
    if variant not in VARIANTS:
        sys.exit(f"shift_variants: name one of {', '.join(VARIANTS)}, then settings of `train`.")
    if variant in FACTORS:
        scale_shift_gradients(FACTORS[variant])
    else:
        draw_whole_pixels()
    sys.exit(main(["train", *rest]))
