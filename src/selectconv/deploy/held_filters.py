"""Filters that a compressed model keeps for a few readers, although most readers closed them.

A filter can go only when nobody reads it. In a residual trunk or a concatenation many layers read
the same filters: one open slot keeps what all the others have closed.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import fx
from torch.nn.modules.conv import _ConvNd

from selectconv.deploy.layout import Layout, Mask, plan_layout, reads
from selectconv.trace.dataflow import Dataflow
from selectconv.trace.kinds import Kind

_MAKERS = (Kind.CONV, Kind.LINEAR)
_PASSED = (Kind.NORM, Kind.CHANNELWISE, Kind.CONCAT, Kind.CHANNEL_PAD)
_NO_READERS = (*_PASSED, Kind.TENSOR, Kind.SHAPE, Kind.INPUT)


@dataclass(frozen=True)
class HeldFilters:
    """Filters of one conv that stay although more than half of their readers closed them.

    Attributes:
        name: the conv.
        count: the number of these filters.
        kept: the number of all filters of the conv that stay.
        readers: the layers that still read any of them, those that read most of them first.
        macs: multiply-adds of these filters, for the whole example.
    """

    name: str
    count: int
    kept: int
    readers: tuple[str, ...]
    macs: int


def held_lines(held: Sequence[HeldFilters], most: int = 10) -> list[tuple[str, ...]]:
    """Return the lines of a table, header first, with at most `most` rows."""
    lines: list[tuple[str, ...]] = [("conv", "filters", "still read by", "multiply-adds")]
    for row in held[:most]:
        more = len(row.readers) - 2
        names = ", ".join(row.readers[:2]) + (f" and {more} more" if more > 0 else "")
        lines.append((row.name, f"{row.count} of {row.kept}", names, f"{row.macs / 1e6:,.2f}M"))
    return lines


def find_held(flow: Dataflow) -> list[HeldFilters]:
    """Find the filters that stay for a few readers, the most expensive ones first.

    Args:
        flow: the traced model, with its present allocation.
    """
    layout = plan_layout(flow)
    could: dict[fx.Node, npt.NDArray[np.int64]] = {}
    does: dict[fx.Node, dict[str, Mask]] = {}
    for node, op in flow.operations.items():
        if op.kind in _NO_READERS:
            continue
        every = np.ones(op.channels, dtype=bool)
        for maker, mask in _makers(flow, node, every, opened=False).items():
            could.setdefault(maker, np.zeros(len(mask), dtype=np.int64))[mask] += 1
        if node in layout.kept or op.kind is Kind.OUTPUT:
            name = "the output" if op.kind is Kind.OUTPUT else str(node.target)
            for maker, mask in _makers(flow, node, every, opened=True).items():
                does.setdefault(maker, {})[name] = mask
    rows = []
    for maker, total in could.items():
        if maker in layout.kept and flow.operations[maker].kind is Kind.CONV:
            row = _row(flow, layout, maker, total, does.get(maker, {}))
            if row.count and row.readers:  # what nobody reads stays for a round number
                rows.append(row)
    return sorted(rows, key=lambda row: -row.macs)


def _row(
    flow: Dataflow,
    layout: Layout,
    maker: fx.Node,
    total: npt.NDArray[np.int64],
    readers: dict[str, Mask],
) -> HeldFilters:
    kept = layout.kept[maker]
    count = sum((mask.astype(np.int64) for mask in readers.values()), np.zeros_like(total))
    held = np.zeros(len(total), dtype=bool)
    held[kept] = True
    held &= 2 * count < total
    read = Counter({name: int((mask & held).sum()) for name, mask in readers.items()})
    batch, _, *spatial = flow.operations[maker].shape
    weights = sum(part.num_weights for part in layout.parts[maker])
    macs = batch * math.prod(spatial) * weights * int(held.sum()) // len(kept)
    names = tuple(name for name, number in read.most_common() if number)
    return HeldFilters(str(maker.target), int(held.sum()), len(kept), names, macs)


def _makers(flow: Dataflow, reader: fx.Node, need: Mask, *, opened: bool) -> dict[fx.Node, Mask]:
    """Find the convs whose filters reach a reader through channelwise operations.

    Args:
        flow: the traced model.
        reader: who reads.
        need: of its own channels, those that are needed.
        opened: count its open slots only; else all that it was built with.
    """
    found: dict[fx.Node, Mask] = {}
    ahead = list(_inputs(flow, reader, need, opened=opened))
    while ahead:
        node, mask = ahead.pop()
        kind = flow.operations[node].kind
        if kind in _MAKERS:
            found[node] = found[node] | mask if node in found else mask.copy()
        elif kind in _PASSED and mask.any():
            ahead.extend(reads(flow, flow.operations[node], mask))
    return found


def _inputs(
    flow: Dataflow, reader: fx.Node, need: Mask, *, opened: bool
) -> Iterator[tuple[fx.Node, Mask]]:
    op = flow.operations[reader]
    for other, mask in reads(flow, op, need):
        is_whole = not opened and isinstance(op.module, _ConvNd)
        yield other, np.ones_like(mask) if is_whole else mask
