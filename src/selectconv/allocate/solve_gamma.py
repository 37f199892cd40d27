"""Gamma, solved for: the order in which a growing gamma closes slots, and `gamma="auto"`.

A gamma that suits one network, weight decay and length of training closes nothing or far too much
in another. A share of the slots means the same everywhere: with "auto", at most `SHARE` of the
slots are closed over a training, and gamma is solved for at each step.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from selectconv.allocate.settings import Settings
from selectconv.core.layer import SelectConvNd
from selectconv.core.plan import LayerPlan
from selectconv.errors import AllocationError, naming

FLOOR = 0.1  # the part of its slots that a layer keeps open, whatever a budget or "auto" asks for
SHARE = 0.6  # at most this part is closed and re-opened in a training; some count repeatedly
CLOSED_SHARE = 0.2  # at most this part is closed in a training where none is re-opened
# The paper's gamma, for layers that never re-open a slot in a model whose other layers do.
CLOSE_ONLY = 1e-3
# A step closes slots of a layer up to the damage of this many average slots of that layer: so
# little is closed where nothing has faded. One gamma for all layers would close more in wide layers
# than in narrow ones.
MOST = 1.5
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


class ClosingQueue:
    """The open slots of all layers, in the order in which a growing gamma closes them.

    Args:
        layers: the selective layers by name; at least one.
        damage: as for `SelectConv2d.ecdm`.
        protected: by layer, the slots that are not to be closed.

    Attributes:
        levels: (Q,), the smallest gamma that closes each slot of the queue.
        owners: (Q,), the number of its layer.
        slots: (Q,), its number in that layer.

    Raises:
        AllocationError, MeanSourceError: as for `ChannelAllocator.step`.
    """

    def __init__(
        self, layers: Mapping[str, SelectConvNd], damage: str, protected: Mapping[str, Tensor]
    ) -> None:
        self.names = list(layers)
        slots, levels = [], []
        for name, layer in layers.items():
            with naming(name):
                of_layer, at = _closing_order(layer, damage, protected.get(name))
            slots.append(of_layer)
            levels.append(at)
        owners = [torch.full_like(one, number) for number, one in enumerate(slots)]
        # Stable: a layer's slots stay in their order.
        self.levels, order = torch.cat(levels).sort(stable=True)
        self.owners, self.slots = torch.cat(owners)[order], torch.cat(slots)[order]

    def __len__(self) -> int:
        return len(self.levels)

    def gamma_at(self, number: int) -> float:
        """Return the smallest gamma that closes the first `number` slots, or all there are."""
        first = self.levels[:number].tolist()
        return min(1.0, first[-1]) if first else 0.0

    def plans(self, places: Iterable[int]) -> dict[str, LayerPlan]:
        """Return, by layer, the plan that closes the slots at these places of the queue."""
        chosen = torch.tensor(list(places), dtype=torch.int64, device="cpu")
        owners, slots = self.owners[chosen], self.slots[chosen]
        return {
            name: LayerPlan(closed=slots[owners == number].sort().values)
            for number, name in enumerate(self.names)
        }


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
    can_close = layer.gate.clone()
    if protected is not None:
        can_close &= ~protected.to(can_close.device)
    slots = can_close.nonzero().flatten()
    slots = slots[largest[slots].sort(stable=True).indices]
    width = layer.in_channels // layer.groups
    open_slots = layer.gate.view(layer.groups, width).sum(dim=1)
    room = (open_slots - math.ceil(FLOOR * width)).clamp(min=0)
    of_group = slots // width == torch.arange(layer.groups, device=slots.device)[:, None]
    place = (of_group.cumsum(dim=1) * of_group).sum(dim=0)  # 1 for the first slot of its group
    slots = slots[place <= room[slots // width]]
    # On the CPU, as in `choose_dealloc`.
    levels = necdm[slots].cpu().cumsum(dim=0).amax(dim=1)
    return slots.cpu(), levels.double()
