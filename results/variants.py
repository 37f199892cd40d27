"""Screen variants of the method: train as usual, with one thing changed.

    python results/variants.py frozen --config FILE.yaml --out FOLDER   # as for `train`

Shifts: `frozen` keeps them where they were drawn; `lr10` gives them ten times the learning rate
(their gradient is multiplied: the same for SGD); `whole` draws them on whole pixels, and lets them
learn from there; `eighth` draws them up to an eighth of the map. Damage, with `--damage rms`:
`variance` leaves out the mean, which a batch norm removes anyway. With `--growth gradient`:
`jitter` starts within half a pixel of the chosen offset; `drawn` takes the channel alone from the
gradient, and draws the shift as the paper does. These are controls, not settings of the package.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.param_groups import param_groups
from selectconv.core import damage, slots
from selectconv.core.allocation import ReallocRule
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.core.slots import SlottedConvNd
from selectconv.lab.cli.main import main
from selectconv.lab.train import loop

MAX_SHIFT = 1.5  # the paper's


def scale_shift_gradients(factor: float) -> None:
    """Multiply the gradients of all shifts that are trained from now on."""

    def scaled(model: nn.Module, *decays: Any) -> list[dict[str, Any]]:
        for layer in selective_layers(model).values():
            if layer.shift is not None:
                layer.shift.register_hook(lambda grad: factor * grad)
        return param_groups(model, *decays)

    loop.param_groups = scaled


def draw_whole_pixels() -> None:
    """Round the shifts that are drawn from now on."""
    drawn = slots.draw_shift

    def rounded(*how: Any) -> Tensor:
        return drawn(*how).round()

    slots.draw_shift = rounded


def draw_up_to_an_eighth() -> None:
    """Draw shifts up to an eighth of the maps that a layer has seen."""
    plan, is_input = SlottedConvNd.plan, SelectConvNd._is_input

    def seeing(layer: SelectConvNd, x: Tensor) -> bool:
        layer.__dict__["side"] = x.shape[-1]
        return is_input(layer, x)

    def planned(layer: Any, *, rule: ReallocRule | None = None, **how: Any) -> LayerPlan:
        if rule is not None:
            rule = replace(rule, max_shift=layer.__dict__["side"] / 8)
        return plan(layer, rule=rule, **how)

    SelectConvNd._is_input = seeing
    SlottedConvNd.plan = planned


def leave_out_means() -> None:
    """Measure damage by the variance alone."""
    rms = damage.rms_damage

    def by_variance(weight: Tensor, mean: Tensor, var: Tensor, groups: int = 1) -> Tensor:
        return rms(weight, torch.zeros_like(mean), var, groups)

    damage.rms_damage = by_variance


def draw_shifts_of_growth(jitter: bool) -> None:
    """Draw shifts also where the gradient chooses: around its offset, or as the paper does."""
    choose = SlottedConvNd._choose_by_gradient

    def drawn(
        layer: SlottedConvNd, gate: Tensor, rule: ReallocRule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        opened, source, shift, gains = choose(layer, gate, rule)
        # Seeded by what was chosen, so that a resumed training draws the same.
        seed = int(opened.sum()) * 1000003 + int(source.sum()) * 7919 + len(opened)
        noise = torch.rand(shift.shape, generator=torch.Generator().manual_seed(seed))
        shift = shift + noise - 0.5 if jitter else (noise * 2 - 1) * MAX_SHIFT
        return opened, source, shift, gains

    SlottedConvNd._choose_by_gradient = drawn


VARIANTS = {
    "frozen": lambda: scale_shift_gradients(0.0),
    "lr10": lambda: scale_shift_gradients(10.0),
    "whole": draw_whole_pixels,
    "eighth": draw_up_to_an_eighth,
    "variance": leave_out_means,
    "jitter": lambda: draw_shifts_of_growth(jitter=True),
    "drawn": lambda: draw_shifts_of_growth(jitter=False),
}

if __name__ == "__main__":
    variant, *rest = sys.argv[1:] or [""]
    if variant not in VARIANTS:
        sys.exit(f"variants: name one of {', '.join(VARIANTS)}, then settings of `train`.")
    VARIANTS[variant]()
    sys.exit(main(["train", *rest]))
