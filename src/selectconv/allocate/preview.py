"""What a step would close at each of several gammas, and what that would leave."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from selectconv.allocate.cost_after import CostAfter
from selectconv.allocate.decision import decide
from selectconv.allocate.settings import AllocatorState, Settings
from selectconv.checks import check_fraction
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.plan import AllocationPlan
from selectconv.errors import CompressionError
from selectconv.extras import import_extra
from selectconv.tables import counted, html_table, text_table


@dataclass(frozen=True)
class GammaRow:
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
        now: what the model is before the step, at gamma 0 and without any slot closed.
        num_slots: all slots of its selective layers.
        num_layers: its selective layers.
        notes: what the rows leave out, and why.
    """

    now: GammaRow
    num_slots: int
    num_layers: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([text_table(self._lines(), right=range(6)), *self.notes])

    def _repr_html_(self) -> str:
        return html_table(self._lines(), right=range(6), note=" ".join(self.notes))

    def plot(self, ax: Any = None) -> Any:
        """Plot against gamma the shares of slots, multiply-adds and layers that would stay.

        Args:
            ax: matplotlib axes to draw into. None: new ones.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if ax is None:
            _, ax = import_extra("matplotlib.pyplot", "A plot").subplots()
        shares = {
            "slots that stay open": [row.open / self.num_slots for row in self],
            "layers that close none": [1 - row.layers / self.num_layers for row in self],
        }
        if self.now.macs:
            shares["multiply-adds"] = [(row.macs or 0) / self.now.macs for row in self]
        gammas = [row.gamma for row in self]
        for name, values in shares.items():
            ax.plot(gammas, [100 * value for value in values], marker="o", label=name)
        scale = "log" if min(gammas) > 0 else "linear"
        ax.set(xscale=scale, xlabel="gamma", ylabel="per cent", ylim=(0, 105))
        ax.legend()
        return ax

    def _lines(self) -> list[tuple[str, ...]]:
        heads = ("gamma", "closed", "layers", "open", "multiply-adds", "parameters")
        rows = [
            (f"{row.gamma:g}", *(_show(one) for one in list(vars(row).values())[1:]))
            for row in self
        ]
        return [heads, *rows]


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

    def row(gamma: float, plan: AllocationPlan) -> GammaRow:
        closed = sum(len(layer_plan.closed) for _, layer_plan in plan)
        cost = None if counter is None else counter.count(plan.layers)
        costs = () if cost is None else (cost.macs, cost.params)
        return GammaRow(gamma, closed, len(plan.layers), is_open - closed, *costs)

    rows = []
    for gamma in wanted:
        at_gamma = replace(settings, gamma=gamma)
        rows.append(row(gamma, decide(at_gamma, state, model, known, state.last_epoch + 1).plan))
    table = GammaTable(rows)
    table.now = row(0.0, AllocationPlan())
    table.num_slots, table.num_layers = num_slots, len(layers)
    table.notes = tuple(notes)
    return table


def _show(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
