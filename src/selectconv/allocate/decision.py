"""What an allocator would do at a step: a plan for each layer. Deciding changes nothing.

A gamma that suits one network, weight decay and length of training closes nothing or far too much
in another. A share of the slots means the same everywhere: with `gamma="auto"`, at most `SHARE` of
the slots are closed over a training, and gamma is solved for at each step.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from selectconv.allocate.budget import FLOOR, Budget, ClosingQueue
from selectconv.allocate.filters import FilterQueue, Filters
from selectconv.allocate.last_readers import LastReaders
from selectconv.allocate.settings import AllocatorState, Settings
from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import ObservedMean
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.errors import AllocationError, naming
from selectconv.graph.convert import find_stale_sources

SHARE = 0.6  # at most this part is closed and re-opened in a training; some count repeatedly
CLOSED_SHARE = 0.2  # at most this part is closed in a training where none is re-opened
# The paper's gamma, for layers that never re-open a slot in a model whose other layers do.
CLOSE_ONLY = 1e-3
# A step closes slots of a layer up to the damage of this many average slots of that layer: so
# little is closed where nothing has faded. One gamma for all layers would close more in wide layers
# than in narrow ones.
MOST = 1.5
_WARM_UP = 0.05  # the part of the training before the first step


def decide(
    settings: Settings,
    state: AllocatorState,
    model: nn.Module,
    layers: Mapping[str, SelectConvNd],
    epoch: int | None,
    *,
    closes: bool = True,
    reopens: bool = False,
    budget: Budget | None = None,
    filters: Filters | None = None,
    last_readers: LastReaders | None = None,
) -> tuple[AllocationPlan, AllocatorState]:
    """Decide what to close and to re-open: a plan, and the allocator's state after it.

    Args:
        settings: the allocator's.
        state: what its steps have left.
        model: without wrappers.
        layers: those of its selective layers to decide for; frozen ones are left out.
        epoch: of the step; None: on demand.
        closes: whether to close slots.
        reopens: whether to re-open slots.
        budget: what the model may cost after the step.
        filters: those that are closed whole, in place of slots.
        last_readers: finds the slots that stay because nobody else reads their channel.

    Raises:
        AllocationError, MeanSourceError: as `ChannelAllocator.step`.
    """
    # Closing a slot of a frozen conv would change what it computes, and nothing would mend it.
    layers = {name: layer for name, layer in layers.items() if not layer.is_frozen}
    layers = _reached(layers, is_first=state.last_epoch < 0)
    _check_layers(model, layers)
    if state.last_epoch < 0:
        _warn_of_stale_sources(model, layers)
    generator = state.make_generator()
    now = state.last_epoch if epoch is None else epoch
    protected = state.protected(now, settings.grace)
    if closes and last_readers is not None:
        kept = last_readers.find(layers, settings.damage)
        protected = {name: kept[name] | protected[name] for name in kept}
    if budget is not None and epoch is not None and layers:
        plans = budget.plan(layers, epoch, protected, generator)
    elif filters is not None and not reopens:
        plans = _close_filters(settings, filters, epoch)
    else:
        rule = settings.rule if reopens else None
        gammas: Mapping[str, Any] = dict.fromkeys(layers, settings.gamma if closes else None)
        if closes and settings.gamma == "auto":
            gammas = solve_gammas(settings, layers, epoch, protected)
        plans = {}
        for name, layer in layers.items():
            with naming(name):
                plans[name] = layer.plan(
                    gamma=gammas[name],
                    rule=rule,
                    damage=settings.damage,
                    protected=protected.get(name),
                    generator=generator,
                )
    plan = AllocationPlan({name: plan for name, plan in plans.items() if plan})
    return plan, replace(state, generator=generator.get_state()).after(plan, now)


def _close_filters(settings: Settings, filters: Filters, epoch: int | None) -> dict[str, LayerPlan]:
    """Decide which filters to close: up to gamma or, with "auto", the epoch's share of them."""
    queue = FilterQueue(filters, settings.damage, FLOOR)
    if settings.gamma == "auto":
        # The share of all steps so far: that of one may be less than a block.
        share = sum(
            share_of_slots(settings, one) for one in ([None] if epoch is None else range(epoch + 1))
        )
        closed = 0 if epoch is None else int((~filters.find_open()).sum())
        number = int((queue.sizes.cumsum(0) + closed <= share * len(filters.groups)).sum())
    else:
        number = int((queue.levels <= float(settings.gamma)).sum())
    return queue.plans(range(number))


def _reached(layers: Mapping[str, SelectConvNd], *, is_first: bool) -> Mapping[str, SelectConvNd]:
    """Leave out layers that training does not reach; before the first step, warn of them.

    They observe their input's mean, and have seen nothing where other layers have. If none has,
    the model was not trained, which is an error.
    """
    observed = [
        name for name, layer in layers.items() if isinstance(layer.mean_source, ObservedMean)
    ]
    unused = [name for name in observed if not layers[name].knows_mean()]
    if len(unused) == len(observed):
        return layers
    if unused and is_first:
        warn(
            f"training has not reached {', '.join(f'`{name}`' for name in unused)}: no slot is "
            "closed there until it does."
        )
    return {name: layer for name, layer in layers.items() if name not in unused}


def _check_layers(model: nn.Module, layers: Mapping[str, SelectConvNd]) -> None:
    """Refuse weights that are recomputed or shared, and batch norms that are not in the model."""
    modules = set(model.modules())
    owners = Counter(id(p) for module in modules for p in module._parameters.values())
    for name, layer in layers.items():
        with naming(name):
            layer.check_owns_weight()
        if owners[id(layer.weight)] > 1:
            raise AllocationError(
                f"`{name}`: another module has the same weight, whose slots would change with "
                "this layer's: tie weights before sc.convert, which leaves them plain."
            )
        for bn in () if layer.mean_source is None else layer.mean_source.batch_norms():
            # Another module with the same tensors (SyncBatchNorm's conversion) is as good.
            own = bn.running_mean if bn.weight is None else bn.weight
            tensors = () if bn in modules else (*model.parameters(), *model.buffers())
            if bn not in modules and not any(own is tensor for tensor in tensors):
                raise AllocationError(
                    f"`{name}`: its mean source reads a batch norm that is not in the "
                    "model any more: set `mean_source` to BatchNormMean(the new one, act)."
                )


def _warn_of_stale_sources(model: nn.Module, layers: Mapping[str, SelectConvNd]) -> None:
    """Warn of closed forms that `convert` found, and that do not hold any more."""
    stale = [
        f"`{name}` assumes {layers[name].mean_source} (now: {now})"
        for name, now in find_stale_sources(model).items()
        if name in layers
    ]
    if stale:
        warn(
            f"what sc.convert found does not hold any more: {'; '.join(stale)}. Convert after "
            "activations are replaced and batch norms put in eval(), or set `mean_source` of these "
            "layers, such as to sc.ObservedMean()."
        )


def share_of_slots(settings: Settings, epoch: int | None) -> float:
    """Return the part of all slots that the step after an epoch closes; it falls to zero.

    On demand, where `epoch` is None, it is that of the first step.
    """
    # A short training has no epoch to lose.
    first = min(math.floor(_WARM_UP * settings.total_epochs), max(settings.num_steps - 1, 0))
    epoch = first if epoch is None else epoch
    if not first <= epoch < settings.num_steps:
        return 0.0
    steps = settings.num_steps - first
    total = SHARE if settings.reopens else CLOSED_SHARE
    return total * 2 * (settings.num_steps - epoch) / (steps * (steps + 1))


def solve_gammas(
    settings: Settings,
    layers: Mapping[str, SelectConvNd],
    epoch: int | None,
    protected: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return a gamma for each of these layers: one that closes the epoch's share of the slots.

    Raises:
        AllocationError: NaN or infinite weights or statistics.
        MeanSourceError: a layer that does not know its input's mean.
    """
    shared = {
        name: layer
        for name, layer in layers.items()
        if not settings.reopens or layer.shift is not None
    }
    gammas = dict.fromkeys(layers, CLOSE_ONLY)
    if shared:
        slots = sum(layer.in_channels for layer in shared.values())
        number = round(share_of_slots(settings, epoch) * slots)
        levels = ClosingQueue(shared, settings.damage, protected).levels[:number].tolist()
        solved = max(levels, default=0.0)  # it closes all of them
        for name, layer in shared.items():
            gammas[name] = min(1.0, solved, MOST * layer.groups / layer.in_channels)
    return gammas
