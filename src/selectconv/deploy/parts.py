"""What a selective conv becomes: one plain conv, and what that conv reads.

Slots that read their channel as it is become one part: the distinct channels that they read. Slots
shifted by whole pixels are a second part: for each offset, their channels with zeros on one side
and as much cut off the other. Other shifted slots are a third part. A bilinear shift is a small
stencil, so a depthwise conv shifts their channels. One conv reads all parts, joined, so that a
runtime can fold the batch norm after it; where none follows, adding up two convs is about as fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from selectconv.core.layer import SelectConvNd

Channels = npt.NDArray[np.int64]
# Multiply-adds that take as long as gathering one number does; see benchmarks/gather_cost.py.
MACS_PER_PASS = 24.0
# ONNX Runtime has fast kernels for blocks of 8 channels (16 with AVX-512): a depthwise conv of
# another number of channels takes several times as long; see benchmarks/shifted_convs.py.
BLOCK = 8
# No blocks are used where they would add much to a small network, and make its budgets coarse.
_FEW = 64  # channels of a depthwise conv
_MOST_ADDED = 0.02  # of the model's weights, by one conv with shifts
_ROUNDING = 1e-6  # of a pixel
_NONE = -1  # fills up the rows of groups that read fewer channels than others


@dataclass(frozen=True)
class Blocks:
    """The multiples to which depthwise convs and convs with shifts round their channels up.

    Attributes:
        round_to: as for `compress`.
        num_weights: of the whole model.
    """

    round_to: int | None
    num_weights: int

    def of_depthwise(self, channels: int) -> int:
        """Return the multiple for a depthwise conv: 1 if it has few channels or no whole blocks."""
        return self.round_to or (BLOCK if channels >= _FEW and channels % BLOCK == 0 else 1)

    def of_shifts(self, conv: _ConvNd) -> int:
        """Return the multiple for a conv that joins shifted channels to others."""
        added = (BLOCK - 1) * conv.weight.numel() / conv.in_channels
        return self.round_to or (BLOCK if added <= _MOST_ADDED * self.num_weights else 1)


@dataclass(frozen=True)
class Part:
    """A part of what the plain conv reads that replaces a conv.

    Attributes:
        conv: the conv that is replaced.
        filters: (G, O / G), the filters of `conv` that are kept, by group that is left.
        slots: (G, n), the slots of `conv` that it stands for; -1 fills up a group that has fewer.
        sources: (G, I / G), the channels that it reads, filled up likewise. Those that a depthwise
            conv shifts are by slot.
        is_gathered: its input is to be gathered; else it is the whole value.
        reach: by spatial axis, how many pixels its shifts reach; empty: nothing is shifted.
        offsets: (sources, axes), the whole pixels by which the sources are shifted; None: a
            depthwise conv shifts, or nothing does.
    """

    conv: _ConvNd
    filters: Channels
    slots: Channels
    sources: Channels
    is_gathered: bool
    reach: tuple[int, ...] = ()
    offsets: Channels | None = None

    @property
    def order(self) -> Channels:
        """The order in which its sources are written: equal offsets side by side."""
        return np.arange(self.sources.size) if self.offsets is None else np.lexsort(self.offsets.T)

    @property
    def num_weights(self) -> int:
        """Weights of the conv: also its multiply-adds for each position of its output."""
        return int(self.filters.size * self.sources.shape[1] * math.prod(self.conv.kernel_size))

    @property
    def num_stencil_weights(self) -> int:
        """Weights of the depthwise conv: also its multiply-adds for each position of its input."""
        size = math.prod(2 * reach + 1 for reach in self.reach)
        return int(self.sources.size * size) if self.reach and self.offsets is None else 0


def plan_parts(
    conv: _ConvNd,
    filters: Channels,
    available: Channels,
    spatial: Sequence[int],
    round_to: int | None = 1,
    block: int = 1,
    gathers: bool = True,
) -> list[Part]:
    """Choose what the plain conv reads that replaces a conv: channels as they are, shifted ones.

    The first part is that of the channels as they are, if there are any.

    Args:
        conv: a plain or selective conv.
        filters: the filters to keep, equally many in each group of which any is kept.
        available: the channels that its input keeps, in order.
        spatial: the size of its input's maps.
        round_to: round the number of inputs of an ungrouped conv up to a multiple of it; None: read
            exactly what is needed, whether or not that pays.
        block: round the numbers of channels that an ungrouped conv joins up to multiples of it.
        gathers: whether some of the channels may be gathered; if not, all are read.
    """
    groups = conv.groups
    in_use = np.unique(filters // (conv.out_channels // groups))
    by_group = filters.reshape(len(in_use), -1)
    slots = np.arange(conv.in_channels).reshape(groups, -1)[in_use]
    if not isinstance(conv, SelectConvNd):
        return [_as_they_are(conv, by_group, list(slots), available, round_to, gathers)]
    offset = shifts_of(conv)
    # A shift out of the frame reads nothing but zeros.
    is_read = conv.gate.cpu().numpy() & np.all(np.abs(offset) < np.asarray(spatial), axis=1)
    is_shifted, is_between = np.any(offset, axis=1), np.any(offset % 1, axis=1)
    still, copied, shifted = (
        [row[is_read[row] & is_kind[row]] for row in slots]
        for is_kind in (~is_shifted, is_shifted & ~is_between, is_between)
    )
    block = block if len(slots) == 1 else 1  # groups read equally many in any case
    if any(map(len, copied)):
        round_to = None if round_to == 1 else round_to  # joining copies what is read in any case
    if any(map(len, shifted)):
        round_to = None if round_to is None else math.lcm(round_to, block)
    parts = []
    if any(map(len, still)) or not any(map(len, (*copied, *shifted))):
        parts.append(_as_they_are(conv, by_group, still, available, round_to, gathers))
    if any(map(len, copied)):
        total = sum(part.sources.size for part in parts) + sum(map(len, copied))
        more = max(min(-total % block, conv.in_channels - total), 0)  # no more than it reads now
        parts.append(_shifted(conv, by_group, copied, offset, more, is_whole=True))
    if any(map(len, shifted)):
        parts.append(_shifted(conv, by_group, shifted, offset, -sum(map(len, shifted)) % block))
    return parts


def open_shifts(conv: object) -> npt.NDArray[np.float64]:
    """Read the shifts of a conv's open slots; a plain conv has none."""
    if not isinstance(conv, SelectConvNd):
        return np.zeros(0)
    shifts: npt.NDArray[np.float64] = shifts_of(conv)[conv.gate.cpu().numpy()]
    return shifts


def shifts_of(conv: SelectConvNd) -> npt.NDArray[np.float64]:
    """Read the shift of every slot, (I, axes); 0 where none applies.

    An average of equal shifts may be off by a rounding: what is almost whole is whole.
    """
    if conv.shift is None:
        return np.zeros((conv.in_channels, len(conv.kernel_size)))
    shift = conv.shift.detach().cpu().double().numpy()
    shift = np.where(np.abs(shift - np.round(shift)) < _ROUNDING, np.round(shift), shift)
    return np.where(conv.shifted.cpu().numpy()[:, None], shift, 0.0)


def _as_they_are(
    conv: _ConvNd,
    filters: Channels,
    slots: list[Channels],
    available: Channels,
    round_to: int | None,
    gathers: bool = True,
) -> Part:
    index = _index_of(conv)
    sources = _stack([np.unique(index[row]) for row in slots])
    if sources.shape[1] == 0:  # all slots are closed: a conv needs an input, of weight zero
        sources = np.full((len(slots), 1), available[0])
    if len(slots) == 1 and round_to is not None:
        macs = filters.size * math.prod(conv.kernel_size) / math.prod(conv.stride)
        saved = macs / MACS_PER_PASS if gathers else 0.0
        sources = narrow(available, sources[0], saved, round_to)[None]
    is_gathered = not np.array_equal(sources.reshape(-1), available)
    return Part(conv, filters, _stack(slots), sources, is_gathered)


def narrow(available: Channels, wanted: Channels, saved: float, round_to: int = 1) -> Channels:
    """Choose what to read of a value: what is wanted of it, or all, where a gather does not pay.

    Args:
        available: the channels that the value keeps, in order.
        wanted: the channels that are wanted of it, in order.
        saved: what is saved by each channel that is not read, in passes over its elements.
        round_to: round the number of channels up to a multiple of it, as far as there are any.
    """
    more = min(math.ceil(len(wanted) / round_to) * round_to, len(available)) - len(wanted)
    rounded = wanted
    if more:
        rounded = np.sort(np.concatenate([wanted, np.setdiff1d(available, wanted)[:more]]))
    does_gather_pay = (len(available) - len(rounded)) * saved > len(rounded)
    return rounded if does_gather_pay else available


def _shifted(
    conv: _ConvNd,
    filters: Channels,
    slots: list[Channels],
    offset: npt.NDArray[np.float64],
    more: int,
    *,
    is_whole: bool = False,
) -> Part:
    if is_whole:
        slots = [row[np.lexsort(offset[row].T)] for row in slots]
    every = np.concatenate(slots)
    lowest, highest = np.floor(offset[every]), np.ceil(offset[every])
    reach = tuple(np.maximum(-lowest, highest).max(axis=0).astype(int).tolist())
    stacked = np.pad(_stack(slots), ((0, 0), (0, more)), constant_values=_NONE)
    by_slot = np.where(stacked == _NONE, _NONE, _index_of(conv)[stacked])
    filled = np.where(stacked == _NONE, every[-1], stacked)
    offsets = offset[filled.reshape(-1)].astype(np.int64) if is_whole else None
    return Part(conv, filters, stacked, by_slot, True, reach, offsets)


def _stack(rows: list[Channels]) -> Channels:
    """Make a matrix of rows of different lengths."""
    stacked = np.full((len(rows), max(map(len, rows))), _NONE)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked


def conv_weight(part: Part) -> Tensor:
    """Build the conv's weight for what a part reads; channels that no slot reads get zeros."""
    weight = part.conv.weight.detach().cpu()  # MPS has no float64
    width = part.conv.in_channels // part.conv.groups
    per_filter = (part.sources.shape[1], *part.conv.kernel_size)
    out = weight.new_zeros(*part.filters.shape, *per_filter, dtype=torch.float64)
    for group, row in enumerate(part.slots):
        slots = row[row != _NONE]
        place = np.arange(len(slots))
        if not part.reach:
            place = np.argmax(part.sources[group] == _index_of(part.conv)[slots, None], axis=1)
        own = weight[part.filters[group]][:, slots % width].double()
        out[group].index_add_(1, torch.from_numpy(place), own)
    return out.flatten(0, 1).to(weight.dtype).to(part.conv.weight.device)


def stencil_weight(part: Part) -> Tensor:
    """Build the weight (channels, 1, ...) of the depthwise conv that shifts what a part reads."""
    assert isinstance(part.conv, SelectConvNd)
    slots = part.slots.reshape(-1)
    offset = shifts_of(part.conv)[slots]
    whole, rows = np.floor(offset), np.arange(len(slots))
    out = np.where(slots == _NONE, 0.0, 1.0).reshape(-1, *[1] * len(part.reach))
    for axis, reach in enumerate(part.reach):  # the bilinear shift, axis by axis
        taps = np.zeros((len(slots), 2 * reach + 2))
        # What fills up a block (_NONE) may be shifted by anything.
        near = np.clip(whole[:, axis].astype(int) + reach, 0, 2 * reach)
        taps[rows, near] = 1 - (offset - whole)[:, axis]
        taps[rows, near + 1] = (offset - whole)[:, axis]
        along = [-1 if other == axis else 1 for other in range(len(part.reach))]
        out = out * taps[:, :-1].reshape(len(slots), *along)  # the last tap is always 0
    return torch.from_numpy(out).unsqueeze(1).to(part.conv.weight.dtype).to(part.conv.weight.device)


def _index_of(conv: _ConvNd) -> Channels:
    return (
        conv.index.cpu().numpy() if isinstance(conv, SelectConvNd) else np.arange(conv.in_channels)
    )
