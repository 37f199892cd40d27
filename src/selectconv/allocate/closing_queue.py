"""The open slots of all layers in one queue: the order in which a growing gamma closes them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from selectconv.core.layer import SelectConvNd
from selectconv.errors import AllocationError, naming

FLOOR = 0.1
"""The part of its slots that a layer keeps open, whatever a budget asks for."""


class ClosingQueue:
    """The open slots of all layers, in the order in which a growing gamma closes them.

    Args:
        layers: the selective layers by name.
        damage: as for `SelectConv2d.ecdm`.
        protected: by layer, the slots that are not to be closed; None: all may be.
    """

    def __init__(
        self,
        layers: Mapping[str, SelectConvNd],
        damage: str,
        protected: Mapping[str, Tensor | None],
    ) -> None:
        self.names = list(layers)
        self._gates = {name: layer.gate.cpu() for name, layer in layers.items()}
        self.slots: dict[str, Tensor] = {}
        levels = []
        owners = []
        for number, (name, layer) in enumerate(layers.items()):
            with naming(name):
                slots, level = _closing_order(layer, damage, protected.get(name))
            self.slots[name] = slots
            levels.append(level)
            owners.append(torch.full_like(slots, number))
        order = torch.cat(levels).sort(stable=True)  # stable: a layer's slots stay in their order
        self.levels = order.values
        self.owners = torch.cat(owners)[order.indices]

    def __len__(self) -> int:
        return len(self.levels)

    def number_at(self, gamma: float) -> int:
        """Return how many slots a gamma closes."""
        return int((self.levels <= gamma).sum())

    def gamma_at(self, number: int) -> float:
        """Return the smallest gamma that closes the first `number` slots."""
        return 0.0 if number == 0 else min(1.0, float(self.levels[number - 1]))

    def owner(self, place: int) -> str:
        """Return the layer of the slot at a place."""
        return self.names[int(self.owners[place])]

    def counts(self, number: int) -> dict[str, int]:
        """Return how many of the first `number` slots are each layer's."""
        counts = torch.bincount(self.owners[:number], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def first(self, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the first slots of each layer in the queue, this many of each, sorted."""
        return {name: self.slots[name][:size].sort().values for name, size in counts.items()}

    def close(self, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the gates that closing `first(counts)` would leave, on the CPU."""
        return {
            name: self._gates[name].index_fill(0, slots, False)
            for name, slots in self.first(counts).items()
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
    room = (open_slots - num_kept(width)).clamp(min=0)
    of_group = slots // width == torch.arange(layer.groups, device=slots.device)[:, None]
    place = (of_group.cumsum(dim=1) * of_group).sum(dim=0)  # 1 for the first slot of its group
    slots = slots[place <= room[slots // width]]
    # On the CPU, as in `choose_dealloc`.
    levels = necdm[slots].cpu().cumsum(dim=0).amax(dim=1) if len(slots) else largest[:0].cpu()
    return slots.cpu(), levels.double()


def num_kept(width: int) -> int:
    """Return how many of `width` slots the floor keeps open."""
    return math.ceil(FLOOR * width)
