"""`gamma="auto"`: how much to move at each step, for those who do not want to choose a gamma.

A gamma that suits one network, weight decay and length of training closes nothing or far too much
in another. A share of the slots means the same everywhere: over a training at most `SHARE` of the
slots are closed, and gamma is solved for at each step.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from selectconv.allocate.closing_queue import ClosingQueue
from selectconv.allocate.settings import Settings
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


def first_epoch(settings: Settings) -> int:
    """Return the first epoch whose step closes anything; a short training has none to lose."""
    return min(math.floor(_WARM_UP * settings.total_epochs), max(settings.num_steps - 1, 0))


def share_of_slots(settings: Settings, epoch: int) -> float:
    """Return the part of all slots that the step after an epoch closes; it falls to zero."""
    first = first_epoch(settings)
    if not first <= epoch < settings.num_steps:
        return 0.0
    steps = settings.num_steps - first
    total = SHARE if settings.reopens else CLOSED_SHARE
    return total * 2 * (settings.num_steps - epoch) / (steps * (steps + 1))


def solve_gammas(
    settings: Settings,
    layers: Mapping[str, SelectConvNd],
    epoch: int,
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
        if not settings.reopens or (layer.shift is not None and layer.weight.requires_grad)
    }
    gammas = dict.fromkeys(layers, CLOSE_ONLY)
    if shared:
        slots = sum(layer.in_channels for layer in shared.values())
        number = round(share_of_slots(settings, epoch) * slots)
        solved = ClosingQueue(shared, settings.damage, protected).gamma_at(number)
        for name, layer in shared.items():
            gammas[name] = min(solved, MOST * layer.groups / layer.in_channels)
    return gammas
