"""`gamma="auto"`: how much to move at each step, for those who do not want to choose a gamma.

A gamma that suits one network, weight decay and length of training closes nothing or far too much
in another. A share of the slots means the same everywhere: over a training at most `SHARE` of the
slots are closed, and gamma is solved for at each step.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from selectconv.allocate.closing_queue import ClosingQueue
from selectconv.core.layer import SelectConvNd

SHARE = 0.6
"""At most this part of the slots is closed and re-opened in a training; some count repeatedly."""

CLOSED_SHARE = 0.2
"""At most this part of the slots is closed in a training where none is re-opened."""

CLOSE_ONLY = 1e-3
"""The gamma of layers that never re-open a slot in a model whose other layers do: the paper's."""

MOST = 1.5
"""A step closes slots of a layer up to the damage of this many average slots of that layer.

So little is closed where nothing has faded. One gamma for all layers would close more slots in wide
layers than in narrow ones.
"""

_WARM_UP = 0.05  # the part of the training before the first step
_GRACE = 0.1  # the part of the training in which a re-opened slot is not closed again


class AutoGamma:
    """The schedule of a training: a share of the slots for each step, falling to zero.

    Args:
        total_epochs: the length of the training.
        stop_at: the part of it in which steps act.
        reopens: whether closed slots are re-opened.

    Attributes:
        grace: epochs in which a re-opened slot is not closed again.
    """

    def __init__(self, total_epochs: int, stop_at: float, *, reopens: bool) -> None:
        self.reopens = reopens
        self.total = SHARE if reopens else CLOSED_SHARE
        self.num_steps = math.ceil(stop_at * total_epochs)
        # A short training has no epochs to lose.
        self.first = min(math.floor(_WARM_UP * total_epochs), max(self.num_steps - 1, 0))
        self.grace = math.ceil(_GRACE * total_epochs)

    def share(self, epoch: int) -> float:
        """Return the part of all slots that the step after an epoch closes."""
        steps = self.num_steps - self.first
        left = self.num_steps - epoch
        if not self.first <= epoch < self.num_steps:
            return 0.0
        return self.total * 2 * left / (steps * (steps + 1))

    def solve(
        self,
        layers: Mapping[str, SelectConvNd],
        epoch: int,
        damage: str,
        protected: Mapping[str, Tensor | None],
    ) -> dict[str, float]:
        """Return a gamma for each of these layers: one that closes the epoch's share of the slots.

        Raises:
            AllocationError: NaN or infinite weights or statistics.
            MeanSourceError: a layer that does not know its input's mean.
        """
        shared = {
            name: layer
            for name, layer in layers.items()
            if not self.reopens or (layer.shift is not None and layer.weight.requires_grad)
        }
        gammas = dict.fromkeys(layers, CLOSE_ONLY)
        if shared:
            number = round(self.share(epoch) * sum(layer.in_channels for layer in shared.values()))
            queue = ClosingQueue(shared, damage, protected)
            solved = queue.gamma_at(min(number, len(queue)))
            for name, layer in shared.items():
                gammas[name] = min(solved, MOST * layer.groups / layer.in_channels)
        return gammas
