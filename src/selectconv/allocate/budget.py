"""Budgets: training that ends at a part of the dense model's cost.

The budget falls linearly over the epochs in which an allocator acts. At each step gamma, one for
all layers, is solved for: every open slot has a smallest gamma at which Algorithm 1 would close it,
so the slots of all layers stand in one order, and what is left after closing the first n of them is
counted as `sc.count` counts it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.closing_queue import FLOOR, ClosingQueue, num_kept
from selectconv.allocate.shadow_cost import ShadowCost
from selectconv.checks import check_fraction, warn
from selectconv.core.allocation import ReallocRule
from selectconv.core.layer import SelectConvNd
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.errors import AllocationError

TOLERANCE = 0.01
"""How far from the target, as a part of it, a run may end without a warning."""

_NEAR = 1 + TOLERANCE / 2  # after the last acting epoch, only more than this is corrected
_LOOK_AHEAD = 64  # slots further on in the queue that are tried to come nearer to a budget


def check_targets(
    target_macs: float | None, target_params: float | None
) -> tuple[str, float] | None:
    """Check the two targets, of which at most one is given; return that one's name and value.

    Raises:
        TypeError, ValueError: both, or one that is not a number strictly between 0 and 1.
    """
    targets = {"target_macs": target_macs, "target_params": target_params}
    given = {
        name: check_fraction(name, value) for name, value in targets.items() if value is not None
    }
    for name, value in given.items():
        if value in (0.0, 1.0):
            raise ValueError(
                f"`{name}` must be a fraction of the dense model's cost, above 0 and below 1; "
                f"got {value!r}."
            )
    if len(given) > 1:
        raise ValueError(
            f"`target_macs` {target_macs!r} and `target_params` {target_params!r} cannot be "
            "combined: give one of them."
        )
    return next(iter(given.items()), None)


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
        ValueError: there is no `example_input`, no epoch to act in, or the target cannot be
            reached; the message says the closest.
    """

    def __init__(
        self, model: nn.Module, name: str, fraction: float, example_input: Any, num_steps: int
    ) -> None:
        if example_input is None:
            raise ValueError(f"`{name}` needs an `example_input` to count the model with.")
        if num_steps < 1:
            raise ValueError(f"`{name}` needs steps that act: `stop_at` must be above 0, got 0.")
        self.name = name
        self.fraction = fraction
        self.num_steps = num_steps
        self.gamma: float | None = None
        self.solved: float | None = None
        self._shadow = ShadowCost(model, example_input)
        layers = self._shadow.layers
        for layer in layers.values():  # dense, also where a run is resumed
            layer.index.copy_(torch.arange(layer.in_channels))
            layer.shifted.fill_(False)
        self.dense = self._count({name: torch.ones_like(m.gate) for name, m in layers.items()})
        least = self._count({name: _least_gate(layer) for name, layer in layers.items()})
        if least > (1 + TOLERANCE) * self.target:
            raise ValueError(
                f"`{name}` {fraction:g} cannot be reached: selective layers keep at least "
                f"{FLOOR:.0%} of their slots, plain layers all; the closest is "
                f"{least / self.dense:.3f}. sc.describe(model) says why layers are plain."
            )

    @property
    def target(self) -> float:
        """The cost to end at."""
        return self.fraction * self.dense

    def at(self, epoch: int) -> float:
        """Return the budget after an epoch's step: a line from the dense cost to the target."""
        passed = min(epoch + 1, self.num_steps) / self.num_steps
        return self.dense - (self.dense - self.target) * passed

    def describe(self, layers: Mapping[str, SelectConvNd]) -> str:
        """Say what part of the dense model's cost is left, and what the target is."""
        self._shadow.follow(layers)
        left = self._count({name: layer.gate for name, layer in layers.items()}) / self.dense
        what = "multiply-adds" if self.name == "target_macs" else "parameters"
        return f"{left:.1%} of the {what} left, target {100 * self.fraction:g}%"

    def plan(
        self,
        layers: Mapping[str, SelectConvNd],
        *,
        epoch: int,
        damage: str,
        gamma: float,
        rule: ReallocRule | None,
        protected: Mapping[str, Tensor | None],
        generator: torch.Generator,
    ) -> AllocationPlan:
        """Decide what to close, and then to re-open, so that the budget of the epoch is met.

        The last step, and any later one, only closes; the later ones only where shifts that have
        been trained since make the model cost more than the target.

        Args:
            layers: the model's selective layers by name.
            epoch: 0-based.
            damage: as for `SelectConv2d.ecdm`.
            gamma: where slots are re-opened, at least those that this gamma would close are closed.
            rule: how to re-open; None: not at all.
            protected: by layer, the slots that are not to be closed; None: all may be.
            generator: of the allocator's random numbers.

        Raises:
            AllocationError: NaN or infinite weights or statistics.
            MeanSourceError: a layer that does not know its input's mean.
        """
        self._shadow.follow(layers)
        self.solved = self.gamma
        if epoch >= self.num_steps:
            cost = self._count({name: layer.gate for name, layer in layers.items()})
            if cost <= _NEAR * self.target:
                return AllocationPlan()
        queue = ClosingQueue(layers, damage, protected)
        budget = self.at(epoch)
        if rule is None or epoch + 1 >= self.num_steps:
            return self._close(queue, budget, is_last=epoch + 1 >= self.num_steps)
        # Room for what is re-opened: closed for the next epoch's fall as well.
        fall = (self.dense - self.target) / self.num_steps
        number = max(self._solve(queue, budget - fall), queue.number_at(gamma))
        self.solved = queue.gamma_at(number)
        counts = queue.counts(number)
        closed, plans = queue.first(counts), {}
        for name, layer in layers.items():
            plans[name] = layer.plan(
                closed=closed[name],
                rule=rule if layer.weight.requires_grad else None,
                damage=damage,
                generator=generator,
            )
        return self._reopen(plans, queue.close(counts), budget)

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs: the target, to be sure of it, and the last gamma."""
        return {"name": self.name, "fraction": self.fraction, "gamma": self.gamma}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a `state_dict()` of another target.

        Raises:
            AllocationError: it is one.
        """
        if not isinstance(state, Mapping) or set(state) != {"name", "fraction", "gamma"}:
            raise AllocationError(f"`state` is damaged: its budget is {state!r:.60}.")
        if (state["name"], state["fraction"]) != (self.name, self.fraction):
            raise AllocationError(
                f"`state` is from a training with `{state['name']}` {state['fraction']!r}, "
                f"this one has `{self.name}` {self.fraction!r}."
            )

    def _close(self, queue: ClosingQueue, budget: float, *, is_last: bool) -> AllocationPlan:
        """Close slots until the budget is met, and re-open none."""
        number = self._solve(queue, budget)
        self.solved = queue.gamma_at(number)
        counts = self._fill(queue, number, budget)
        reached = self._count(queue.close(counts)) if is_last else self.target
        if abs(reached - self.target) > TOLERANCE * self.target:
            warn(
                f"`{self.name}` {self.fraction:g} was not met: {reached / self.dense:.3f} of the "
                "dense model's cost is the closest that closing whole slots allows."
            )
        closed = queue.first(counts)
        return AllocationPlan(
            {name: LayerPlan(closed=slots) for name, slots in closed.items() if len(slots)}
        )

    def _solve(self, queue: ClosingQueue, budget: float) -> int:
        """Return the least number of slots, the first of the queue, that meets the budget."""

        def is_met(number: int) -> bool:
            return self._count(queue.close(queue.counts(number))) <= budget

        return _first(-1, len(queue), is_met)

    def _fill(self, queue: ClosingQueue, number: int, budget: float) -> dict[str, int]:
        """Come nearer to the budget, if possible, than the first `number` slots of the queue do.

        The last one may be expensive. Without it, and without the slots of its layer that follow,
        some that come later in the queue may fit instead.
        """

        def count(counts: dict[str, int]) -> int:
            return self._count(queue.close(counts))

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
        self, plans: Mapping[str, LayerPlan], gates: Mapping[str, Tensor], budget: float
    ) -> AllocationPlan:
        """Re-open as many slots, an equal part in every layer, as the budget has room for.

        Args:
            plans: what each layer would re-open, were there room for all of its closed slots: so
                the random numbers that a step uses up do not depend on the search.
            gates: the slots that are open before any is re-opened.
            budget: the most that the model may cost.
        """
        # Each layer's first half before any layer's second half.
        order = sorted(
            ((place + 1) / len(plan.opened), number, name)
            for number, (name, plan) in enumerate(plans.items())
            for place in range(len(plan.opened))
        )
        for name, plan in plans.items():
            self._shadow.layers[name].apply_checked_plan(plan)

        def cut(total: int) -> dict[str, LayerPlan]:
            sizes = dict.fromkeys(plans, 0)
            for _, _, name in order[:total]:
                sizes[name] += 1
            return {name: _cut(plans[name], size) for name, size in sizes.items()}

        def is_too_expensive(total: int) -> bool:
            opened = {name: plan.opened for name, plan in cut(total).items()}
            after = {name: gate.index_fill(0, opened[name], True) for name, gate in gates.items()}
            return self._count(after) > budget

        chosen = cut(_first(0, len(order) + 1, is_too_expensive) - 1)
        return AllocationPlan({name: plan for name, plan in chosen.items() if plan})

    def _count(self, gates: Mapping[str, Tensor]) -> int:
        cost = self._shadow.count(gates)
        return cost.macs if self.name == "target_macs" else cost.params


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Bisect for the least number above `low` for which it `holds`; else `high`, untried."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _least_gate(layer: SelectConvNd) -> Tensor:
    """Return the gate of a layer that was closed down to the floor."""
    width = layer.in_channels // layer.groups
    return (torch.arange(width) < num_kept(width)).repeat(layer.groups)


def _cut(plan: LayerPlan, size: int) -> LayerPlan:
    """Return a plan that re-opens the first `size` slots only."""
    return replace(
        plan,
        opened=plan.opened[:size],
        source=plan.source[:size],
        shift=None if plan.shift is None else plan.shift[:size],
        weight_seed=plan.weight_seed if size else None,
    )
