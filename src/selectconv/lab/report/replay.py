"""What happened to every slot, replayed from a run's `allocation.jsonl`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from selectconv.allocate.report import AllocationReport
from selectconv.core.models import selective_layers
from selectconv.core.plan import LayerPlan

OWN, CLOSED, MOVED = 0, 1, 2


@dataclass(frozen=True)
class LayerHistory:
    """The slots of one layer over the training.

    Attributes:
        name: the layer's dotted name.
        can_shift: its slots may be shifted.
        source: the channel that each slot reads at the end.
        last: at the end, of each slot: `OWN`, `CLOSED` or `MOVED`.
        num_closed: how often each slot was closed.
        num_copied: how often each channel was chosen as the source of a re-opened slot.
        states: as `last`, at the end of each epoch.
    """

    name: str
    can_shift: bool
    source: list[int]
    last: list[int]
    num_closed: list[int]
    num_copied: list[int]
    states: list[list[int]] = field(default_factory=list)

    def carry_out(self, plan: LayerPlan) -> None:
        """Note what a step did to the layer."""
        closed, opened, sources = (
            part.tolist() for part in (plan.closed, plan.opened, plan.source)
        )
        highest = max([*closed, *opened, *sources], default=0)
        if highest >= len(self.last):
            raise ValueError(f"{self.name!r} has {len(self.last)} slots; the log names {highest}.")
        for slot in closed:
            self.last[slot] = CLOSED
            self.num_closed[slot] += 1
        for slot, source in zip(opened, sources, strict=True):
            self.last[slot] = MOVED
            self.source[slot] = source
            self.num_copied[source] += 1


def replay(model: nn.Module, log: Sequence[AllocationReport], epochs: int) -> list[LayerHistory]:
    """Replay a log, layer by layer in the order of the network.

    Slots that are closed at the end are closed in `model` too, which costs then what the trained
    network does.

    Raises:
        ValueError: the log does not fit the network.
    """
    layers = selective_layers(model)
    histories = {}
    for name, layer in layers.items():
        size, can_shift = len(layer.gate), layer.shift is not None
        histories[name] = LayerHistory(
            name, can_shift, list(range(size)), [OWN] * size, [0] * size, [0] * size
        )
    for epoch in range(epochs):
        for name, plan in (step for report in log if report.epoch == epoch for step in report.plan):
            if name not in histories:
                raise ValueError(f"the network has no layer {name!r}.")
            histories[name].carry_out(plan)
        for history in histories.values():
            history.states.append(list(history.last))
    for name, history in histories.items():
        layers[name].close([slot for slot, state in enumerate(history.last) if state == CLOSED])
    return list(histories.values())
