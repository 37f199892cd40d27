"""What an allocator would do at a step: a plan for each layer. Deciding changes nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from selectconv.allocate.budget import Budget
from selectconv.allocate.settings import AllocatorState, Settings
from selectconv.allocate.solve_gamma import first_epoch, solve_gammas
from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import ObservedMean
from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError, naming


class Decided(NamedTuple):
    """What was decided: a plan, and the allocator's state after it."""

    plan: AllocationPlan
    state: AllocatorState


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
) -> Decided:
    """Decide what to close and to re-open.

    Args:
        settings: the allocator's.
        state: what its steps have left.
        model: without wrappers.
        layers: those of its selective layers to decide for.
        epoch: of the step; None: on demand.
        closes: whether to close slots.
        reopens: whether to re-open slots.
        budget: what the model may cost after the step.

    Raises:
        AllocationError, MeanSourceError: as `ChannelAllocator.step`.
    """
    layers = _reached(layers, is_first=state.last_epoch < 0)
    _check_layers(model, layers)
    generator = state.make_generator()
    now = state.last_epoch if epoch is None else epoch
    protected = state.protected(now, settings.grace)
    if budget is not None and epoch is not None:
        plans = budget.plan(layers, epoch, protected, generator)
    else:
        gammas: Mapping[str, Any] = dict.fromkeys(layers, settings.gamma if closes else None)
        if closes and settings.gamma == "auto":
            when = first_epoch(settings) if epoch is None else epoch  # on demand: as at first
            gammas = solve_gammas(settings, layers, when, protected)
        plans = {}
        for name, layer in layers.items():
            # Weights that do not learn could make nothing of another channel.
            rule = settings.rule if reopens and layer.weight.requires_grad else None
            with naming(name):
                plans[name] = layer.plan(
                    gamma=gammas[name],
                    rule=rule,
                    damage=settings.damage,
                    protected=protected.get(name),
                    generator=generator,
                )
    plan = AllocationPlan({name: plan for name, plan in plans.items() if plan})
    return Decided(plan, replace(state, generator=generator.get_state()).after(plan, now))


def _reached(layers: Mapping[str, SelectConvNd], *, is_first: bool) -> Mapping[str, SelectConvNd]:
    """Leave out layers that training does not reach; before the first step, warn of them.

    They observe their input's mean, and have seen nothing where other layers have. If none has,
    the model was not trained, which is an error.
    """
    observed = [
        name for name, layer in layers.items() if isinstance(layer.mean_source, ObservedMean)
    ]
    unused = [name for name in observed if not layers[name].knows_mean()]
    if not unused or len(unused) == len(observed):
        return layers
    if is_first:
        warn(
            f"training has not reached {', '.join(f'`{name}`' for name in unused)}: no slot is "
            "closed there until it does."
        )
    return {name: layer for name, layer in layers.items() if name not in unused}


def _check_layers(model: nn.Module, layers: Mapping[str, SelectConvNd]) -> None:
    """Refuse weights that are recomputed, and batch norms that were taken out of the model."""
    # Another module with the same tensors (SyncBatchNorm's conversion) is as good.
    held = {id(own) for own in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, layer in layers.items():
        with naming(name):
            layer.check_owns_weight()
        for bn in () if layer.mean_source is None else layer.mean_source.batch_norms():
            tensor = bn.running_mean if bn.weight is None else bn.weight
            if held.isdisjoint({id(bn), id(tensor)}):
                raise AllocationError(
                    f"`{name}`: its mean source reads a batch norm that is not in the "
                    "model any more: set `mean_source` to BatchNormMean(the new one, act)."
                )
