"""What a step would close at each of several gammas, and what that would leave."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selectconv.allocate.shadow_cost import ShadowCost
from selectconv.checks import check_fraction
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.deploy.cost import Cost
from selectconv.errors import CompressionError, naming
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
        unknown: layers that are left out because they have not seen any input yet.
        uncounted: why the cost is not known although there is an example input; otherwise empty.
    """

    unknown: tuple[str, ...] = ()
    uncounted: str = ""

    def __str__(self) -> str:
        return "\n".join([text_table(self._lines(), right=range(6)), *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(self._lines(), right=range(6), note=" ".join(self._notes()))

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
        gammas = [row.gamma for row in self]
        lines = {
            "slots that stay open": [row.open for row in self],
            "layers that close none": [self._num_layers - row.layers for row in self],
        }
        totals = {
            "slots that stay open": self._num_slots,
            "layers that close none": self._num_layers,
        }
        if all(row.macs is not None for row in self) and self._dense is not None:
            lines["multiply-adds"] = [row.macs or 0 for row in self]
            totals["multiply-adds"] = self._dense.macs
        for name, values in lines.items():
            shares = [100 * value / max(1, totals[name]) for value in values]
            ax.plot(gammas, shares, marker="o", label=name)
        if min(gammas, default=0) > 0:
            ax.set_xscale("log")
        ax.set_xlabel("gamma")
        ax.set_ylabel("per cent")
        ax.set_ylim(0, 105)
        ax.legend()
        return ax

    _num_slots: int = 0
    _num_layers: int = 0
    _dense: Cost | None = None

    def _lines(self) -> list[tuple[str, ...]]:
        lines: list[tuple[str, ...]] = [
            ("gamma", "closed", "layers", "open", "multiply-adds", "parameters")
        ]
        for row in self:
            cost = ["-" if value is None else f"{value:,}" for value in (row.macs, row.params)]
            counts = (f"{row.closed:,}", str(row.layers), f"{row.open:,}")
            lines.append((f"{row.gamma:g}", *counts, cost[0], cost[1]))
        return lines

    def _notes(self) -> list[str]:
        notes = [f"of {self._num_slots:,} slots in {counted(self._num_layers, 'layer')}"]
        if self.unknown:
            notes.append(f"not known before the first batch: {', '.join(self.unknown)}")
        if self.uncounted:
            notes.append(f"the cost cannot be counted: {self.uncounted}")
        return notes


def tabulate_gammas(
    model: nn.Module,
    gammas: Iterable[float],
    *,
    damage: str,
    protected: Mapping[str, Tensor | None],
    example_input: Any = None,
) -> GammaTable:
    """Count what one step would close at each gamma; changes nothing.

    Args:
        model: has selective layers.
        gammas: numbers from 0 to 1.
        damage: as for `SelectConv2d.ecdm`.
        protected: by layer, the slots that are not to be closed; None: all may be.
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
    known = {name: layer for name, layer in layers.items() if layer.knows_mean()}
    gates = {name: layer.gate for name, layer in layers.items()}
    shadow, dense, uncounted = None, None, ""
    if example_input is not None:
        try:
            shadow = ShadowCost(model, example_input)
            dense = shadow.count(gates)
        except CompressionError as error:
            shadow, uncounted = None, str(error)
    is_open = sum(int(gate.sum()) for gate in gates.values())
    rows = []
    for gamma in wanted:
        closed = {name: _closed(name, layer, gamma, damage, protected.get(name))
                  for name, layer in known.items()}  # fmt: skip
        left = {name: gates[name].index_fill(0, slots.to(gates[name].device), False)
                for name, slots in closed.items()}  # fmt: skip
        number = sum(map(len, closed.values()))
        cost = None if shadow is None else shadow.count({**gates, **left})
        rows.append(
            GammaRow(
                gamma=gamma,
                closed=number,
                layers=sum(len(slots) > 0 for slots in closed.values()),
                open=is_open - number,
                macs=None if cost is None else cost.macs,
                params=None if cost is None else cost.params,
            )
        )
    table = GammaTable(rows)
    table.unknown = tuple(name for name in layers if name not in known)
    table._num_slots = sum(layer.in_channels for layer in layers.values())
    table._num_layers = len(layers)
    table._dense = dense
    table.uncounted = uncounted
    return table


def _closed(
    name: str, layer: SelectConvNd, gamma: float, damage: str, protected: Tensor | None
) -> Tensor:
    with naming(name):
        return layer.plan(gamma=gamma, damage=damage, protected=protected).closed
