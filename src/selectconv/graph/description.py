"""A table of a model's convs: their source of E[X], or why they are plain; and their slots."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from selectconv.core.kernels import describe_path
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import unwrap_compiled
from selectconv.errors import MeanSourceError
from selectconv.graph.convert import MIN_CHANNELS, why_plain
from selectconv.tables import html_table, text_table

_CPU = torch.device("cpu")
_FIGURES = range(3, 7)  # columns of figures


@dataclass(frozen=True)
class ConvRow:
    """One conv of a model, as `describe` shows it.

    Attributes:
        name: its dotted name.
        shape: its weight's shape (O, I / groups, ...).
        source: where E[X] comes from. None: the conv is not selective.
        skipped: why the conv is not selective. None: it is selective.
        open: the number of open slots, including re-allocated ones.
        closed: the number of closed slots.
        moved: the number of open slots that were re-allocated.
        smallest_gamma: the smallest gamma that would close a slot now. None: not known, or no
            gamma would.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    skipped: str | None
    open: int
    closed: int
    moved: int
    smallest_gamma: float | None


class Description(tuple[ConvRow, ...]):
    """The rows of `describe`, which print as a table.

    Attributes:
        path: which kernel the selective layers use in eager mode on the model's device, or why
            they use none.
    """

    path: str

    def __str__(self) -> str:
        return f"{text_table(self._lines(), right=_FIGURES)}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(self._lines(), right=_FIGURES, note=self._summary())

    def _lines(self) -> list[tuple[str, ...]]:
        why = "E[X] or why it is plain"
        table: list[tuple[str, ...]] = [
            ("conv", "weight", why, "open", "closed", "moved", "acts from gamma")
        ]
        for row in self:
            gamma = "-" if row.smallest_gamma is None else f"{row.smallest_gamma:.2g}"
            counts = (
                ("-", "-", "-") if row.skipped else (str(row.open), str(row.closed), str(row.moved))
            )
            why = f"plain: {row.skipped}" if row.skipped else str(row.source)
            table.append(
                (row.name or "(model)", "x".join(map(str, row.shape)), why, *counts, gamma)
            )
        return table

    def _summary(self) -> str:
        selective = [row for row in self if not row.skipped]
        closed, moved = sum(row.closed for row in selective), sum(row.moved for row in selective)
        slots = sum(row.open + row.closed for row in selective)
        text = (
            f"{len(selective)} of {len(self)} convs selective; "
            f"of {slots} slots {closed} closed, {moved} re-allocated"
        )
        return f"{text}; eager mode runs on {self.path}" if selective else text


def describe(model: nn.Module) -> Description:
    """List every conv of a model: its slots and where E[X] comes from, or why it is plain.

    Args:
        model: a plain or selective model.

    Example:
        >>> import selectconv as sc
        >>> rows = describe(sc.create_model("densenet40", selective=True))
        >>> len(rows), rows[0].skipped, rows[1].source
        (37, '3 inputs, fewer than min_channels=8', 'batch norm + relu')
    """
    rows = []
    for name, conv in unwrap_compiled(model).named_modules():
        if not isinstance(conv, _ConvNd):
            continue
        is_lazy = isinstance(conv.weight, UninitializedParameter)
        shape = () if is_lazy else tuple(conv.weight.shape)
        if isinstance(conv, SelectConvNd):
            rows.append(_row(name, shape, conv))
            continue
        why = getattr(conv, "_selectconv_skipped", None) or why_plain(conv, MIN_CHANNELS)
        why = str(why or "not converted")
        rows.append(ConvRow(name, shape, None, why, conv.in_channels, 0, 0, None))
    description = Description(rows)
    description.path = describe_path(next((p.device for p in model.parameters()), _CPU))
    return description


def _row(name: str, shape: tuple[int, ...], layer: SelectConvNd) -> ConvRow:
    """Describe a selective conv."""
    try:
        gamma = layer.smallest_gamma()
    except MeanSourceError:
        gamma = None
    source = "none: set `mean_source`" if layer.mean_source is None else repr(layer.mean_source)
    num_open, moved = int(layer.gate.sum()), int((layer.moved & layer.gate).sum())
    return ConvRow(name, shape, source, None, num_open, layer.in_channels - num_open, moved, gamma)
