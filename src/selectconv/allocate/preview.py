"""What a step would close at each of several gammas, and what that would leave."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from selectconv.allocate.budget import CostAfter
from selectconv.allocate.decision import decide
from selectconv.allocate.settings import AllocatorState, Settings
from selectconv.checks import check_fraction
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.errors import CompressionError
from selectconv.tables import counted, html_table, text_table


class GammaRow(NamedTuple):
    """What a step would close at one gamma.

    Attributes:
        gamma: the gamma.
        closed: the number of slots that the step would close.
        layers: the number of layers that would close any.
        open: the number of slots that would stay open, in all layers.
        macs: multiply-adds of the model without the closed slots, before any is re-opened. None:
            there is no example input, or the model cannot be counted.
        params: the same for parameters.
    """

    gamma: float
    closed: int
    layers: int
    open: int
    macs: int | None = None
    params: int | None = None


class GammaTable(tuple[GammaRow, ...]):
    """The rows of `preview(gammas=...)`, which print as a table and show as one in notebooks.

    Attributes:
        notes: of how many slots, what the rows leave out, and why.
    """

    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([text_table(self._lines(), right=range(6)), *self.notes])

    def _repr_html_(self) -> str:
        return html_table(self._lines(), right=range(6), note=" ".join(self.notes))

    def _lines(self) -> list[tuple[str, ...]]:
        heads = ("gamma", "closed", "layers", "open", "multiply-adds", "parameters")
        lines: list[tuple[str, ...]] = [heads]
        for gamma, *counts in self:
            shown = ("-" if number is None else f"{number:,}" for number in counts)
            lines.append((f"{gamma:g}", *shown))
        return lines


def tabulate_gammas(
    settings: Settings,
    state: AllocatorState,
    model: nn.Module,
    known: Mapping[str, SelectConvNd],
    gammas: Iterable[float],
    example_input: Any,
) -> GammaTable:
    """Count what the next step would close at each gamma; changes nothing.

    Args:
        settings: the allocator's.
        state: the allocator's.
        model: has selective layers.
        known: those of them that know the mean of their input.
        gammas: numbers from 0 to 1.
        example_input: as for `sc.count`; None: costs are not counted.

    Raises:
        TypeError, ValueError: a gamma that is not accepted, or none at all.
        AllocationError, MeanSourceError: as for `ChannelAllocator.step`.
    """
    if isinstance(gammas, str) or not isinstance(gammas, Iterable):
        raise TypeError(f"`gammas` must be a list of numbers in [0, 1], got {gammas!r}.")
    wanted = [check_fraction("gammas", gamma) for gamma in gammas]
    if not wanted:
        raise ValueError("`gammas` needs at least one number from 0 to 1, got none.")
    layers = selective_layers(model)
    is_open = sum(int(layer.gate.sum()) for layer in layers.values())
    num_slots = sum(layer.in_channels for layer in layers.values())
    notes = [f"of {num_slots:,} slots in {counted(len(layers), 'layer')}"]
    if unknown := [name for name in layers if name not in known]:
        notes.append(f"not known before the first batch: {', '.join(unknown)}")
    counter = None
    try:
        counter = None if example_input is None else CostAfter(model, example_input)
    except CompressionError as error:
        notes.append(f"the cost cannot be counted: {error}")
    rows = []
    for gamma in wanted:
        at_gamma = replace(settings, gamma=gamma)
        plan = decide(at_gamma, state, model, known, state.last_epoch + 1).plan
        closed = sum(len(layer_plan.closed) for _, layer_plan in plan)
        cost = None if counter is None else counter.count(plan.layers)
        costs = () if cost is None else (cost.macs, cost.params)
        rows.append(GammaRow(gamma, closed, len(plan.layers), is_open - closed, *costs))
    table = GammaTable(rows)
    table.notes = tuple(notes)
    return table
