"""The order in which a growing gamma closes slots, and budgets, which are met by it.

A budget falls linearly over the epochs in which an allocator acts. At each step gamma, one for
all layers, is solved for: every open slot has a smallest gamma at which Algorithm 1 would close it,
so the slots of all layers stand in one order, and what is left after closing the first n of them is
counted. Where no slot is re-opened, gamma is per unit of the cost that closing the slot saves. The
last step counts as `sc.count` does. Earlier steps count what is read: where closing a few slots
saves nothing yet, since gathering the others would not pay, they would close too many.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.filters import FilterQueue, Filters
from selectconv.allocate.settings import Settings
from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import allocation_of, selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.core.slots import new_family
from selectconv.deploy.cost import Cost, CostCounter
from selectconv.errors import AllocationError, BadValue, naming
from selectconv.graph.dataflow import Kind, copy_model
from selectconv.graph.operations import argument

FLOOR = 0.1  # the part of its slots that a layer keeps open, whatever a budget or "auto" asks for
TOLERANCE = 0.01  # how far from the target, as a part of it, a run may end without a warning
_LITTLE = 0.01  # of what closing a filter saves on average
_NEAR = 1 + TOLERANCE / 2  # after the last acting epoch, only more than this is corrected
_LOOK_AHEAD = 64  # slots further on in the queue that are tried to come nearer to a budget


class ClosingQueue:
    """The open slots of all layers, in the order in which a growing gamma closes them.

    Args:
        layers: the selective layers by name; at least one.
        damage: as for `SelectConv2d.ecdm`.
        protected: by layer, the slots that are not to be closed.
        saved: by layer, what closing a slot saves: the order is by damage per saved cost.

    Attributes:
        levels: (Q,), the smallest gamma that closes each slot of the queue, over what is saved.
        owners: (Q,), the number of its layer.
        slots: (Q,), its number in that layer.

    Raises:
        AllocationError, MeanSourceError: as for `ChannelAllocator.step`.
    """

    def __init__(
        self,
        layers: Mapping[str, SelectConvNd],
        damage: str,
        protected: Mapping[str, Tensor],
        saved: Mapping[str, float] | None = None,
    ) -> None:
        self.names, orders = list(layers), []
        for name, layer in layers.items():
            with naming(name):
                own, level = _closing_order(layer, damage, protected.get(name))
            orders.append((own, level if saved is None else level / saved[name]))
        slots, levels = zip(*orders, strict=True)
        owners = [torch.full_like(one, number) for number, one in enumerate(slots)]
        # Stable: a layer's slots stay in their order.
        self.levels, order = torch.cat(levels).sort(stable=True)
        self.owners, self.slots = torch.cat(owners)[order], torch.cat(slots)[order]

    def plans(self, places: Iterable[int]) -> dict[str, LayerPlan]:
        """Return, by layer, the plan that closes the slots at these places of the queue."""
        chosen = torch.tensor(list(places), dtype=torch.int64, device="cpu")
        owners, slots = self.owners[chosen], self.slots[chosen]
        return {
            name: LayerPlan(closed=slots[owners == number].sort().values)
            for number, name in enumerate(self.names)
        }


Queue = ClosingQueue | FilterQueue
Count = Callable[[Mapping[str, LayerPlan]], int]


def _closing_order(
    layer: SelectConvNd, damage: str, protected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a layer's slots in Algorithm 1's order, and the gamma at which each is closed.

    Left out are protected slots and those that the floor keeps. Both tensors are on the CPU.
    """
    necdm = layer.ecdm(normalized=True, damage=damage)
    largest = necdm.amax(dim=1)
    if not bool(largest.isfinite().all()):
        raise AllocationError(
            "the layer's weights or input statistics hold NaN or infinite values."
        )
    gate = layer.gate.view(layer.groups, -1)
    can_close = gate if protected is None else gate & ~protected.to(gate.device).view_as(gate)
    room = gate.sum(dim=1, keepdim=True) - math.ceil(FLOOR * gate.shape[1])
    in_group = largest.view_as(gate).masked_fill(~can_close, math.inf)
    place = in_group.argsort(dim=1, stable=True).argsort(dim=1)  # 0 for the first of its group
    slots = (can_close & (place < room)).flatten().nonzero().flatten()
    slots = slots[largest[slots].sort(stable=True).indices]
    # On the CPU, as in `choose_dealloc`.
    levels = necdm[slots].cpu().cumsum(dim=0).amax(dim=1)
    return slots.cpu(), levels.double()


class CostAfter:
    """Counts what a model would cost after a plan. The model itself is left alone.

    Args:
        model: a model with selective layers.
        example_input: as for `sc.count`.
        filters: those that plans close whole, if any.

    Raises:
        CompressionError: the model cannot be copied or counted.
    """

    def __init__(
        self, model: nn.Module, example_input: Any, filters: Filters | None = None
    ) -> None:
        copy = copy_model(model).eval()
        self._filters = filters
        self._layers = selective_layers(model)
        self._copies = selective_layers(copy)
        for layer in self._copies.values():
            layer.family = new_family()  # not an average of the model, though its weights change
        self._counter = CostCounter(copy, example_input)

    @torch.no_grad()
    def count(self, plans: Mapping[str, LayerPlan], *, is_exact: bool = False) -> Cost:
        """Count the model as it is now, and with these plans carried out."""
        for name, layer in self._layers.items():
            copy = self._copies[name]
            for own, its in zip(allocation_of(copy), allocation_of(layer), strict=True):
                own.copy_(its)
            if name in plans:
                copy.apply_plan(replace(plans[name], weight_seed=None))
        unread = self._filters.unread(plans) if self._filters else None
        return self._counter.count(unread, is_exact=is_exact)

    def saved_by_slot(self, kind: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return, by layer, the "macs" or "params" that an input and an output channel has."""
        inputs, outputs = defaultdict[str, float](float), defaultdict[str, float](float)
        for op in (operations := self._counter.flow.operations).values():
            if op.module is not None and op.kind in (Kind.CONV, Kind.TRANSPOSED, Kind.LINEAR):
                cost = op.macs if kind == "macs" else op.module.get_parameter("weight").numel()
                inputs[op.name] += cost / operations[argument(op.node)].channels
                outputs[op.name] += cost / op.channels
        return inputs, outputs

    def count_fresh(self, kept: float) -> Cost:
        """Count the model before any allocation, with this part of each group's slots open."""
        for layer in self._copies.values():
            width = layer.in_channels // layer.groups
            is_open = torch.arange(width, device="cpu") < math.ceil(kept * width)
            layer.gate.copy_(is_open.repeat(layer.groups))
            layer.index.copy_(torch.arange(layer.in_channels, device="cpu"))
            layer.shifted.fill_(False)
        return self._counter.count({})


class Budget:
    """What a model may cost at each epoch, and the plans that keep it there.

    No layer is closed below a tenth of its slots (`FLOOR`; grouped: of each group's).

    Args:
        model: a model with selective layers.
        settings: the allocator's; they have a target.
        example_input: as for `sc.count`.
        filters: those that steps close whole, if any.

    Attributes:
        dense: what the dense model costs.
        target: the cost to end at.
        saved: by layer, what closing one of its slots saves.

    Raises:
        CompressionError: the model cannot be counted.
        ValueError: there is no `example_input`, or the target cannot be reached; the message says
            the closest.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        example_input: Any,
        filters: Filters | None = None,
    ) -> None:
        assert settings.target is not None
        self.name, self.fraction = settings.target
        self.settings = settings
        if example_input is None:
            raise BadValue(f"`{self.name}` needs an `example_input` to count the model with.")
        self._filters = filters
        self._cost = CostAfter(model, example_input, filters)
        self._kind = self.name.removeprefix("target_")  # an attribute of `Cost`
        self.dense: int = getattr(self._cost.count_fresh(1.0), self._kind)
        self.saved, made = self._cost.saved_by_slot(self._kind)
        self.target: float = self.fraction * self.dense
        least = getattr(self._cost.count_fresh(FLOOR), self._kind)
        if filters is not None:
            # Closing these saves nothing: the hidden channels of squeeze-excite, for instance.
            by_group = [
                sum(self.saved[name] * len(read) for name, read in group.readers.items())
                + sum(made[name] * len(own) for name, own in group.makers.items())
                for group in filters.groups
            ]
            filters.spared = [
                number
                for number, cost in enumerate(by_group)
                if cost * len(by_group) < _LITTLE * sum(by_group)
            ]
            every = FilterQueue(filters, None, FLOOR)
            least = self._count(every.plans(range(len(every.levels))))
        if least > (1 + TOLERANCE) * self.target:
            raise BadValue(
                f"`{self.name}` {self.fraction:g} cannot be reached: layers keep at least "
                f"{FLOOR:.0%} of what they read, plain layers and held filters all; the closest is "
                f"{least / self.dense:.3f}. sc.describe(model) says why layers are plain or held."
            )

    def at(self, epoch: int) -> float:
        """Return the budget after an epoch's step: a line from the dense cost to the target."""
        passed = min(epoch + 1, self.settings.num_steps) / self.settings.num_steps
        return self.dense - (self.dense - self.target) * passed

    def describe(self) -> str:
        """Say what part of the dense model's cost is left, and what the target is."""
        what = {"macs": "multiply-adds", "params": "parameters"}[self._kind]
        left = self._count({}) / self.dense
        return f"{left:.1%} of the {what} left, target {100 * self.fraction:g}%"

    def plan(
        self,
        layers: Mapping[str, SelectConvNd],
        epoch: int,
        protected: Mapping[str, Tensor],
        generator: torch.Generator,
    ) -> dict[str, LayerPlan]:
        """Decide what to close, and then to re-open, so that the budget of the epoch is met.

        Where slots are re-opened, at least those that the user's gamma would close are closed. The
        last step, and any later one, only closes; the later ones only where shifts that have been
        trained since make the model cost more than the target.

        Args:
            layers: the model's selective layers by name.
            epoch: 0-based.
            protected: by layer, the slots that are not to be closed.
            generator: of the allocator's random numbers.

        Raises:
            AllocationError: NaN or infinite weights or statistics.
            MeanSourceError: a layer that does not know its input's mean.
        """
        settings, budget = self.settings, self.at(epoch)
        if epoch >= settings.num_steps and self._count({}) <= _NEAR * self.target:
            return {}
        queue: Queue = (
            ClosingQueue(
                layers, settings.damage, protected, None if settings.reopens else self.saved
            )
            if self._filters is None
            else FilterQueue(self._filters, settings.damage, FLOOR)
        )
        is_last = epoch + 1 >= settings.num_steps
        count = partial(self._count, is_exact=not is_last and self._filters is None)
        if not settings.reopens or is_last:
            plans = _close(queue, budget, count)
            reached = count(plans) if is_last else self.target
            if not 0.95 * self.target <= reached <= (1 + TOLERANCE) * self.target:
                warn(
                    f"`{self.name}` {self.fraction:g} was not met: {reached / self.dense:.3f} of "
                    "the dense model's cost is the closest that closing whole "
                    f"{self.settings.granularity}s, of layers that are not frozen, allows."
                )
            return plans
        # Room for what is re-opened: closed for the next epoch's fall as well.
        fall = (self.dense - self.target) / settings.num_steps
        by_gamma = int((queue.levels <= float(settings.gamma)).sum())
        number = max(_least_number(queue, budget - fall, count), by_gamma)
        plans = {
            name: layers[name].plan(
                closed=plan.closed,
                rule=settings.rule,
                damage=settings.damage,
                generator=generator,
            )
            for name, plan in queue.plans(range(number)).items()
        }
        return _reopen_within(plans, budget, count)

    def _count(self, plans: Mapping[str, LayerPlan], *, is_exact: bool = False) -> int:
        return int(getattr(self._cost.count(plans, is_exact=is_exact), self._kind))


def _close(queue: Queue, budget: float, count: Count) -> dict[str, LayerPlan]:
    """Close the first slots of the queue that meet the budget, or others that come nearer.

    The last of them may be expensive. Without it, and without the slots of its layer that
    follow, some that come later in the queue may fit instead.
    """
    number = _least_number(queue, budget, count)
    plans = queue.plans(range(number))
    miss = abs(count(plans) - budget)
    if number == 0 or miss <= TOLERANCE / 2 * budget:
        return plans
    chosen = list(range(number - 1))
    passed = {int(queue.owners[number - 1])}
    without = queue.plans(chosen)
    trials = {abs(count(without) - budget): without, miss: plans}
    for place in range(number, min(number + _LOOK_AHEAD, len(queue.levels))):
        owner = int(queue.owners[place])
        if owner in passed:
            continue
        plans = queue.plans([*chosen, place])
        cost = count(plans)
        trials.setdefault(abs(cost - budget), plans)
        if cost >= budget:
            chosen.append(place)
        else:
            passed.add(owner)
    return trials[min(trials)]


def _reopen_within(
    plans: Mapping[str, LayerPlan], budget: float, count: Count
) -> dict[str, LayerPlan]:
    """Re-open as many slots, an equal part in every layer, as the budget has room for.

    Args:
        plans: what each layer would re-open, were there room for all of its closed slots: so
            the random numbers that a step uses up do not depend on the search.
        budget: the most that the model may cost.
        count: what it costs after a plan.
    """
    # Each layer's first half before any layer's second half.
    order = sorted(
        ((place + 1) / len(plan.opened), number, name)
        for number, (name, plan) in enumerate(plans.items())
        for place in range(len(plan.opened))
    )

    def reopen(total: int) -> dict[str, LayerPlan]:
        sizes = Counter(name for _, _, name in order[:total])
        return {
            name: replace(
                plan,
                opened=plan.opened[: sizes[name]],
                source=plan.source[: sizes[name]],
                shift=None if plan.shift is None else plan.shift[: sizes[name]],
                weight_seed=plan.weight_seed if sizes[name] else None,
            )
            for name, plan in plans.items()
        }

    return reopen(
        bisect_left(
            range(1, len(order) + 1),
            True,
            key=lambda total: count(reopen(total)) > budget,
        )
    )


def _least_number(queue: Queue, budget: float, count: Count) -> int:
    """Return the least number of slots, the first of the queue, that meets the budget."""
    return bisect_left(
        range(len(queue.levels)),
        True,
        key=lambda number: count(queue.plans(range(number))) <= budget,
    )
