"""What an allocator would do at a step: a plan for each layer. Deciding changes nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.auto_gamma import AutoGamma
from selectconv.allocate.budget import Budget
from selectconv.allocate.replicas import check_batch_norms, check_weights
from selectconv.checks import warn
from selectconv.core.allocation import ReallocRule
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import ObservedMean
from selectconv.core.plan import AllocationPlan
from selectconv.errors import naming

_NEVER = -(1 << 40)  # an epoch long before any


class Decision:
    """How an allocator decides: its settings, and when each slot was last re-opened.

    Args:
        model: without wrappers.
        layers: its selective layers by name.
        gamma: the damage level, or the schedule that solves for it.
        damage: as for `SelectConv2d.ecdm`.
        rule: how closed slots are re-opened.
        grace: the number of epochs in which a re-opened slot is not closed again.
        budget: what the model may cost; None: no target.

    Attributes:
        opened_at: by layer, the epoch in which each slot was last re-opened.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, SelectConvNd],
        *,
        gamma: float | AutoGamma,
        damage: str,
        rule: ReallocRule,
        grace: int,
        budget: Budget | None,
    ) -> None:
        self.model = model
        self.gamma = gamma
        self.damage = damage
        self.rule = rule
        self.grace = grace
        self.budget = budget
        self.opened_at = {
            name: torch.full((layer.in_channels,), _NEVER, device="cpu")
            for name, layer in layers.items()
        }
        self._has_warned = False

    def plan(
        self,
        layers: Mapping[str, SelectConvNd],
        closes: bool,
        reopens: bool,
        epoch: int,
        generator: torch.Generator,
        *,
        is_scheduled: bool = False,
    ) -> AllocationPlan:
        """Plan for these layers; draws from `generator`, changes nothing else.

        Raises:
            AllocationError, MeanSourceError: as `ChannelAllocator.step`.
        """
        layers = self._in_use(layers)
        check_weights(layers)
        check_batch_norms(self.model, layers)
        protected = {name: self.protected(name, epoch) for name in layers}
        if self.budget is not None and is_scheduled:
            assert isinstance(self.gamma, float)
            return self.budget.plan(
                layers,
                epoch=epoch,
                damage=self.damage,
                gamma=self.gamma,
                rule=self.rule if reopens else None,
                protected=protected,
                generator=generator,
            )
        gammas: Mapping[str, Any] = dict.fromkeys(layers)
        if closes and isinstance(self.gamma, AutoGamma):
            when = epoch if is_scheduled else self.gamma.first  # on demand: as much as at first
            gammas = self.gamma.solve(layers, when, self.damage, protected)
        elif closes:
            gammas = dict.fromkeys(layers, self.gamma)
        plans = {}
        for name, layer in layers.items():
            # Weights that do not learn could make nothing of another channel.
            rule = self.rule if reopens and layer.weight.requires_grad else None
            with naming(name):
                plan = layer.plan(
                    gamma=gammas[name],
                    rule=rule,
                    damage=self.damage,
                    protected=protected[name],
                    generator=generator,
                )
            if plan:
                plans[name] = plan
        return AllocationPlan(plans)

    def _in_use(self, layers: Mapping[str, SelectConvNd]) -> Mapping[str, SelectConvNd]:
        """Leave out layers that training does not reach; the first time, warn of them.

        They observe their input's mean, and have seen nothing where other layers have. If none has,
        the model was not trained, which is an error.
        """
        observed = [
            name for name, layer in layers.items() if isinstance(layer.mean_source, ObservedMean)
        ]
        unused = [name for name in observed if not layers[name].knows_mean()]
        if not unused or len(unused) == len(observed):
            return layers
        if not self._has_warned:
            warn(
                f"training has not reached {', '.join(f'`{name}`' for name in unused)}: no slot is "
                "closed there until it does."
            )
            self._has_warned = True
        return {name: layer for name, layer in layers.items() if name not in unused}

    def protected(self, name: str, epoch: int) -> Tensor | None:
        """Return which slots of a layer may not be closed yet, (I,) bool; None: all may be."""
        return epoch - self.opened_at[name] <= self.grace if self.grace else None

    def smallest_gamma(self, layers: Mapping[str, SelectConvNd], epoch: int) -> float | None:
        """Return the smallest gamma at which a step would close a slot that does something."""
        smallest = []
        for name, layer in layers.items():
            gamma = layer.smallest_gamma(self.damage, self.protected(name, epoch))
            if gamma is not None:
                smallest.append(gamma)
        return min(smallest, default=None)
