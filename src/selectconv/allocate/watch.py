"""Watching a model's training steps for `growth="gradient"`: the statistics of all its layers."""

from collections.abc import Mapping
from typing import Any

from selectconv.core.gradients import GradientStatistics
from selectconv.core.layer import SelectConvNd
from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError


class Watch:
    """The statistics of a model's selective layers, each of which reports its forward passes.

    Args:
        layers: the layers by name.
        use_shift: as for `GradientStatistics`.
    """

    def __init__(self, layers: Mapping[str, SelectConvNd], use_shift: bool) -> None:
        if not all(layer.selects_input for layer in layers.values()):
            raise AllocationError(
                'growth="gradient" cannot watch layers that select before batch norm '
                "(placement='before-norm'): build the model with placement='input'."
            )
        self.by_layer = {
            name: GradientStatistics(layer, use_shift=use_shift, phase=number)
            for number, (name, layer) in enumerate(layers.items())
        }
        for name, layer in layers.items():
            layer.statistics = self.by_layer[name]

    def has_seen(self) -> bool:
        """Return whether any layer was watched since the last step."""
        return any(statistics.passes for statistics in self.by_layer.values())

    def check(self) -> None:
        """Refuse to choose what to read before anything was seen; from then on, passes are watched.

        They may not have been: watching ends with the last step that acts, and `realloc` on demand
        comes later.

        Raises:
            AllocationError: there was no backward pass.
        """
        if not self.has_seen():
            for statistics in self.by_layer.values():
                statistics.schedule.is_over = False
            raise AllocationError(
                'growth="gradient" has seen no backward pass since the last step: train the model '
                "itself, in training mode, between steps. Compiled models cannot be watched."
            )

    def forget(self, plan: AllocationPlan) -> None:
        """Forget what was seen of layers whose slots now read something else."""
        for name, layer_plan in plan:
            if len(layer_plan.opened):
                self.by_layer[name].forget()

    def restart(self, is_over: bool) -> None:
        """Begin the next epoch; after the last step that acts, watch no more."""
        for statistics in self.by_layer.values():
            statistics.restart()
            statistics.schedule.is_over = is_over

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs."""
        return {name: statistics.state_dict() for name, statistics in self.by_layer.items()}

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict()`, or change nothing.

        Raises:
            AllocationError: it is of another architecture, or damaged.
        """
        before = self.state_dict()
        try:
            for name, statistics in self.by_layer.items():
                statistics.load_state_dict(state[name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            for name, statistics in self.by_layer.items():
                statistics.load_state_dict(before[name])
            raise AllocationError(
                f"`state` is damaged; reading the statistics of growth failed: {error!r}."
            ) from error
