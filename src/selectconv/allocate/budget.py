"""Budgets: training that ends at a part of the dense model's cost.

The budget falls linearly over the epochs in which an allocator acts. At each step gamma, one for
all layers, is solved for: every open slot has a smallest gamma at which Algorithm 1 would close it,
so the slots of all layers stand in one order, and what is left after closing the first n of them is
counted as `sc.count` counts it.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.closing_queue import FLOOR, ClosingQueue, StepOptions, num_kept
from selectconv.checks import check_fraction
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.deploy.cost import CostCounter
from selectconv.errors import AllocationError, SelectConvWarning
from selectconv.trace.dataflow import check_modules, copy_model

TOLERANCE = 0.01
"""How far from the target, as a part of it, a run may end without a warning."""


_NEAR = 1 + TOLERANCE / 2  # after the last acting epoch, only more than this is corrected
_LOOK_AHEAD = 64  # slots further on in the queue that are tried to come nearer to a budget


def check_targets(target_macs: float | None, target_params: float | None) -> list[str]:
    """Check the two targets, of which at most one is given; return the name of that one.

    Raises:
        TypeError, ValueError: both, or one that is not a number strictly between 0 and 1.
    """
    targets = {"target_macs": target_macs, "target_params": target_params}
    given = {name: value for name, value in targets.items() if value is not None}
    for name, value in given.items():
        if check_fraction(name, value) in (0.0, 1.0):
            raise ValueError(
                f"`{name}` must be a part of the dense model, above 0 and below 1; got {value!r}."
            )
    if len(given) > 1:
        raise ValueError(
            f"`target_macs` {target_macs!r} and `target_params` {target_params!r} exclude each "
            "other: give one of them."
        )
    return list(given)


def build_budget(
    model: nn.Module,
    targets: Mapping[str, float | None],
    example_input: Any,
    num_steps: int,
) -> "Budget | None":
    """Build the budget of an allocator; None where it has no target.

    Raises:
        TypeError, ValueError: a target that is not accepted, cannot be reached, or cannot be
            counted without an `example_input`.
        CompressionError: the model cannot be counted.
    """
    for name in check_targets(targets["target_macs"], targets["target_params"]):
        if example_input is None:
            raise ValueError(f"`{name}` needs an `example_input` to count the model with.")
        fraction = targets[name]
        assert fraction is not None
        return Budget(model, name, fraction, example_input, num_steps)
    return None


class Budget:
    """What a model may cost at each epoch, and the plans that keep it there.

    No layer is closed below a tenth of its slots (`FLOOR`; grouped: of each group's).

    Args:
        model: a model with selective layers; it is copied, to count what plans would leave of it.
        name: "target_macs" or "target_params".
        fraction: the part of the dense model's cost to end at.
        example_input: as for `sc.count`.
        num_steps: the epochs over which the budget falls.

    Attributes:
        gamma: what the last step solved for; None before the first.
        solved: what the last plan solved for, which may have been a preview.

    Raises:
        CompressionError: the model cannot be counted.
        ValueError: the target cannot be reached; the message says the closest.
    """

    def __init__(
        self, model: nn.Module, name: str, fraction: float, example_input: Any, num_steps: int
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"`{name}` needs epochs to act in: `stop_at` is 0.")
        self.name = name
        self.fraction = fraction
        self.num_steps = num_steps
        self.gamma: float | None = None
        self.solved: float | None = None
        # Plans are tried on a copy. What it computes does not matter, only its allocation.
        check_modules(model)
        shadow = copy_model(model).eval()
        self._shadow = selective_layers(shadow)
        for layer in self._shadow.values():  # dense, also where a run is resumed
            layer.index.copy_(torch.arange(layer.in_channels))
            layer.shifted.fill_(False)
        self._counter = CostCounter(shadow, example_input)
        self.dense = self._count({name: torch.ones_like(m.gate) for name, m in self._items()})
        least = self._count({name: _least_gate(m) for name, m in self._items()})
        if least > (1 + TOLERANCE) * self.target:
            raise ValueError(
                f"`{name}` {fraction:g} cannot be reached: every layer keeps {FLOOR:.0%} of its "
                f"slots, and other layers all theirs; the closest is {least / self.dense:.3f}."
            )

    @property
    def target(self) -> float:
        """The cost to end at."""
        return self.fraction * self.dense

    def at(self, epoch: int) -> float:
        """Return the budget after an epoch's step: a line from the dense cost to the target."""
        passed = min(epoch + 1, self.num_steps) / self.num_steps
        return self.dense - (self.dense - self.target) * passed

    def cost(self, layers: Mapping[str, SelectConvNd]) -> int:
        """Count a model, of which these are the selective layers, as it is."""
        self._follow(layers)
        return self._count({name: layer.gate.cpu() for name, layer in layers.items()})

    def plan(self, layers: Mapping[str, SelectConvNd], step: StepOptions) -> AllocationPlan:
        """Decide what to close, and then to re-open, so that the budget of the epoch is met.

        Where slots are re-opened, a step closes for the next epoch's fall as well, and re-opens
        what the budget has room for; the last one only closes. Later steps close slots only where
        shifts that have been trained since make the model cost more than the target.

        Raises:
            AllocationError: NaN or infinite weights or statistics.
            MeanSourceError: a layer that does not know its input's mean.
        """
        self._follow(layers)
        is_open = {name: layer.gate.cpu() for name, layer in layers.items()}
        budget = self.at(step.epoch)
        is_last = step.epoch + 1 >= self.num_steps
        self.solved = self.gamma
        if step.epoch >= self.num_steps and self._count(is_open) <= _NEAR * self.target:
            return AllocationPlan()
        queue = ClosingQueue(layers, step.damage, step.protected)
        reopens = step.rule is not None and not is_last
        fall = (self.dense - self.target) / self.num_steps if reopens else 0.0
        number = self._solve(queue, is_open, budget - fall)
        if reopens:
            number = max(number, queue.number_at(step.gamma))
        self.solved = queue.gamma_at(number)
        counts = queue.counts(number)
        if not reopens:
            counts = self._fill(queue, is_open, number, budget)
            self._check_reached(is_last, queue.close(is_open, counts))
        closed = queue.first(counts)
        if reopens:
            return self._reopen(layers, step, closed, queue.close(is_open, counts), budget)
        return AllocationPlan(
            {name: LayerPlan(closed=slots) for name, slots in closed.items() if len(slots)}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs: the target, to be sure of it, and the last gamma."""
        return {"name": self.name, "fraction": self.fraction, "gamma": self.gamma}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`.

        Raises:
            AllocationError: it is of another target.
        """
        if (state["name"], state["fraction"]) != (self.name, self.fraction):
            raise AllocationError(
                f"`state` is of a training with `{state['name']}` {state['fraction']!r}, "
                f"this one has `{self.name}` {self.fraction!r}."
            )
        self.gamma = state["gamma"]

    def _solve(self, queue: "ClosingQueue", is_open: dict[str, Tensor], budget: float) -> int:
        """Return the least number of slots, the first of the queue, that meets the budget."""
        low, high = -1, len(queue)
        while high - low > 1:
            middle = (low + high) // 2
            cost = self._count(queue.close(is_open, queue.counts(middle)))
            low, high = (low, middle) if cost <= budget else (middle, high)
        return high

    def _fill(
        self, queue: "ClosingQueue", is_open: dict[str, Tensor], number: int, budget: float
    ) -> dict[str, int]:
        """Come nearer to the budget than the first `number` slots of the queue do.

        The last one may be dear. Without it, and without the slots of its layer behind it, some
        that come later in the queue may fit instead.
        """

        def count(counts: dict[str, int]) -> int:
            return self._count(queue.close(is_open, counts))

        best = queue.counts(number)
        miss = abs(count(best) - budget)
        if number == 0 or miss <= TOLERANCE / 2 * budget:
            return best
        counts, passed = queue.counts(number - 1), set[str]()
        if (without := abs(count(counts) - budget)) < miss:
            best, miss = counts, without
        for place in range(number - 1, min(number + _LOOK_AHEAD, len(queue))):
            name = queue.owner(place)
            if name in passed:
                continue
            trial = {**counts, name: counts[name] + 1}
            cost = count(trial)
            if abs(cost - budget) < miss:
                best, miss = trial, abs(cost - budget)
            if cost >= budget:
                counts = trial
            else:
                passed.add(name)
        return best

    def _reopen(
        self,
        layers: Mapping[str, SelectConvNd],
        step: StepOptions,
        closed: dict[str, Tensor],
        is_open: dict[str, Tensor],
        budget: float,
    ) -> AllocationPlan:
        """Re-open as many closed slots, an equal part in every layer, as the budget has room for.

        What each layer would re-open is drawn first, for all of its closed slots: the random
        numbers that a step uses up do not depend on the search.
        """
        plans = {}
        for name, layer in layers.items():
            rule = step.rule if layer.weight.requires_grad else None
            plans[name] = layer.plan(
                closed=closed[name], rule=rule, damage=step.damage, generator=step.generator
            )
        sizes = {name: len(plan.opened) for name, plan in plans.items()}
        # Each layer's first half before any layer's second half.
        order = sorted(
            ((place + 1) / size, number, name)
            for number, (name, size) in enumerate(sizes.items())
            for place in range(size)
        )

        def shares(total: int) -> dict[str, int]:
            opened = dict.fromkeys(sizes, 0)
            for _, _, name in order[:total]:
                opened[name] += 1
            return opened

        def count(total: int) -> int:
            for name, size in shares(total).items():
                self._show_reopened(name, plans[name], size)
            gates = {
                name: is_open[name].index_fill(0, plans[name].opened[:size], True)
                for name, size in shares(total).items()
            }
            return self._count(gates)

        low, high = 0, len(order) + 1  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if count(middle) <= budget else (low, middle)
        chosen = {name: _cut(plans[name], size) for name, size in shares(low).items()}
        return AllocationPlan({name: plan for name, plan in chosen.items() if plan})

    def _items(self) -> list[tuple[str, SelectConvNd]]:
        return list(self._shadow.items())

    @torch.no_grad()
    def _follow(self, layers: Mapping[str, SelectConvNd]) -> None:
        """Take over a model's allocation."""
        for name, shadow in self._shadow.items():
            layer = layers[name]
            shadow.index.copy_(layer.index)
            shadow.shifted.copy_(layer.shifted)
            if shadow.shift is not None and layer.shift is not None:
                shadow.shift.copy_(layer.shift)

    @torch.no_grad()
    def _show_reopened(self, name: str, plan: LayerPlan, size: int) -> None:
        shadow, opened = self._shadow[name], plan.opened[:size]
        shadow.index[opened] = plan.source[:size].to(shadow.index)
        shadow.shifted[opened] = plan.shift is not None
        if shadow.shift is not None and plan.shift is not None:
            shadow.shift[opened] = plan.shift[:size].to(shadow.shift)

    def _count(self, gates: Mapping[str, Tensor]) -> int:
        for name, shadow in self._shadow.items():
            shadow.gate.copy_(gates[name])
        cost = self._counter.count()
        return cost.macs if self.name == "target_macs" else cost.params

    def _check_reached(self, is_last: bool, is_open: dict[str, Tensor]) -> None:
        reached = self._count(is_open)
        if is_last and abs(reached - self.target) > TOLERANCE * self.target:
            warnings.warn(
                f"`{self.name}` {self.fraction:g} was not met: {reached / self.dense:.3f} of the "
                "dense model's is the closest that closing whole slots comes to it now.",
                SelectConvWarning,
                stacklevel=5,
            )


def _least_gate(layer: SelectConvNd) -> Tensor:
    """Return the gate of a layer that was closed down to the floor."""
    width = layer.in_channels // layer.groups
    return (torch.arange(width) < num_kept(width)).repeat(layer.groups)


def _cut(plan: LayerPlan, size: int) -> LayerPlan:
    """Return a plan that re-opens the first `size` slots only."""
    return LayerPlan(
        closed=plan.closed,
        opened=plan.opened[:size],
        source=plan.source[:size],
        shift=None if plan.shift is None else plan.shift[:size],
        weight_seed=plan.weight_seed if size else None,
    )
