"""The open slots of all layers in one queue: the order in which a growing gamma closes them."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from selectconv.core.layer import SelectConvNd
from selectconv.core.plan import LayerPlan
from selectconv.errors import AllocationError, naming

FLOOR = 0.1
"""The part of its slots that a layer keeps open, whatever a budget asks for."""


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
