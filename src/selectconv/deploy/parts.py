"""What a selective conv becomes: plain convs whose outputs are added up.

Slots that read their channel as it is make up one conv, on the distinct channels that they read.
Shifted slots make up a second one. A bilinear shift is a small stencil, so it can be part of the
kernel, or a depthwise conv of its own in front.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from selectconv.core.layer import SelectConvNd

Channels = npt.NDArray[np.int64]
# Multiply-adds that take as long as reading and writing one number does; see benchmarks/.
MACS_PER_PASS = 12.0
_NONE = -1  # in place of a channel, where a group reads fewer than another


@dataclass(frozen=True)
class Part:
    """One of the plain convs that replace a conv.

    Attributes:
        conv: the conv that it comes from.
        filters: (G, O / G), the filters of `conv` that are kept, by group that is left.
        slots: (G, n), the slots of `conv` that it stands for; -1 where a group has fewer.
        sources: (G, I / G), the channels that it reads; -1 where a group reads fewer. With a
            depthwise conv in front they are by slot.
        is_gathered: its input is to be gathered; else it is the whole value.
        reach: by spatial axis, how many pixels the shifts reach; empty: nothing is shifted.
        is_enlarged: the shifts are in the kernel; else they are a depthwise conv in front.
    """

    conv: _ConvNd
    filters: Channels
    slots: Channels
    sources: Channels
    is_gathered: bool
    reach: tuple[int, ...] = ()
    is_enlarged: bool = False

    @property
    def stencil_size(self) -> tuple[int, ...]:
        """Kernel size of the shifts alone."""
        return tuple(2 * reach + 1 for reach in self.reach)

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Kernel size of the conv."""
        return self.stencil_size if self.is_enlarged else self.conv.kernel_size

    @property
    def has_stencil(self) -> bool:
        """A depthwise conv in front does the shifts."""
        return bool(self.reach) and not self.is_enlarged

    @property
    def num_weights(self) -> int:
        """Weights of the conv: also its multiply-adds for each position of its output."""
        return int(self.filters.size * self.sources.shape[1] * math.prod(self.kernel_size))

    @property
    def num_stencil_weights(self) -> int:
        """Weights of the depthwise conv: also its multiply-adds for each position of its input."""
        return int(self.sources.size * math.prod(self.stencil_size)) if self.has_stencil else 0


def plan_parts(
    conv: _ConvNd,
    filters: Channels,
    available: Channels,
    spatial: Sequence[int],
    round_to: int | None = 1,
) -> list[Part]:
    """Choose the plain convs that replace a conv.

    Args:
        conv: a plain or selective conv.
        filters: the filters to keep, equally many in each group of which any is kept.
        available: the channels that its input keeps, in order.
        spatial: the size of its input's maps.
        round_to: round the number of inputs of an ungrouped conv up to a multiple of it; None: read
            exactly what is needed, whether or not that pays.
    """
    groups = conv.groups
    in_use = np.unique(filters // (conv.out_channels // groups))
    by_group = filters.reshape(len(in_use), -1)
    slots = np.arange(conv.in_channels).reshape(groups, -1)[in_use]
    if not isinstance(conv, SelectConvNd):
        return [_as_they_are(conv, by_group, list(slots), available, round_to)]
    gate = conv.gate.cpu().numpy()
    offset = shifts_of(conv)
    is_shifted = np.any(offset != 0, axis=1)
    # A shift out of the frame reads nothing but zeros.
    in_frame = np.all(np.abs(offset) < np.asarray(spatial), axis=1)
    still = [row[gate[row] & ~is_shifted[row]] for row in slots]
    moving = [row[gate[row] & is_shifted[row] & in_frame[row]] for row in slots]
    parts = []
    if any(map(len, still)) or not any(map(len, moving)):
        parts.append(_as_they_are(conv, by_group, still, available, round_to))
    if any(map(len, moving)):
        parts.append(_shifted(conv, by_group, moving, offset))
    return parts


def shifts_of(conv: SelectConvNd) -> npt.NDArray[np.float64]:
    """Read the shift of every slot, (I, axes); 0 where none applies."""
    if conv.shift is None:
        return np.zeros((conv.in_channels, len(conv.kernel_size)))
    shift = conv.shift.detach().cpu().double().numpy()
    return np.where(conv.shifted.cpu().numpy()[:, None], shift, 0.0)


def _as_they_are(
    conv: _ConvNd,
    filters: Channels,
    slots: list[Channels],
    available: Channels,
    round_to: int | None,
) -> Part:
    index = _index_of(conv)
    sources = _stack([np.unique(index[row]) for row in slots])
    if sources.shape[1] == 0:  # all slots are closed: a conv needs an input, of weight zero
        sources = np.full((len(slots), 1), available[0])
    if len(slots) == 1 and round_to is not None:
        saved = filters.size * math.prod(conv.kernel_size) / math.prod(conv.stride)
        sources = narrow(available, sources[0], saved / MACS_PER_PASS, round_to)[None]
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
) -> Part:
    index, every = _index_of(conv), np.concatenate(slots)
    lowest, highest = np.floor(offset[every]), np.ceil(offset[every])
    reach = tuple(np.maximum(-lowest, highest).max(axis=0).astype(int).tolist())
    stacked = _stack(slots)
    distinct = _stack([np.unique(index[row]) for row in slots])
    enlarged = Part(conv, filters, stacked, distinct, True, reach, is_enlarged=True)
    by_slot = np.where(stacked == _NONE, _NONE, index[stacked])
    stencil = Part(conv, filters, stacked, by_slot, True, reach)
    # The conv pads a shifted map anew: only without padding is the kernel's sum the same thing.
    is_exact = all(size == 1 for size in conv.kernel_size) and _is_unpadded(conv)
    if is_exact and enlarged.num_weights <= stencil.num_weights + 8 * stencil.num_stencil_weights:
        return enlarged
    return stencil


def _is_unpadded(conv: _ConvNd) -> bool:
    return isinstance(conv.padding, str) or not any(conv.padding)


def _stack(rows: list[Channels]) -> Channels:
    """Make a matrix of rows of different lengths."""
    stacked = np.full((len(rows), max(map(len, rows))), _NONE)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked


def conv_weight(part: Part) -> Tensor:
    """Build the weight of a part's conv; what it reads of no slot has weight zero."""
    weight = part.conv.weight.detach()
    width = part.conv.in_channels // part.conv.groups
    shape = (*part.filters.shape, part.sources.shape[1], *part.kernel_size)
    out = weight.new_zeros(shape, dtype=torch.float64)
    for group, row in enumerate(part.slots):
        slots = row[row != _NONE]
        if part.has_stencil:
            place = np.arange(len(slots))
        else:
            index = _index_of(part.conv)[slots]
            place = np.argmax(part.sources[group][None] == index[:, None], axis=1)
        filters = torch.from_numpy(part.filters[group])
        own = weight[filters][:, torch.from_numpy(slots % width)].double()
        if part.is_enlarged:
            own = own * _stencils(part, slots).to(own.device)
        out[group].index_add_(1, torch.from_numpy(place).to(out.device), own)
    return out.flatten(0, 1).to(weight.dtype)


def stencil_weight(part: Part) -> Tensor:
    """Build the weight (channels, 1, ...) of the depthwise conv in front of a part's conv."""
    weight = _stencils(part, np.maximum(part.slots.reshape(-1), 0))
    weight[torch.from_numpy(part.slots.reshape(-1) == _NONE)] = 0.0
    return weight.unsqueeze(1).to(part.conv.weight)


def _stencils(part: Part, slots: Channels) -> Tensor:
    """Write the bilinear shift of each slot as a kernel, (slots, ...)."""
    assert isinstance(part.conv, SelectConvNd)
    offset = shifts_of(part.conv)[slots]
    whole = np.floor(offset)
    fraction = offset - whole
    out = np.ones((len(slots), *[1] * len(part.reach)))
    for axis, reach in enumerate(part.reach):
        taps = np.zeros((len(slots), 2 * reach + 2))
        rows, near = np.arange(len(slots)), whole[:, axis].astype(int) + reach
        taps[rows, near] = 1 - fraction[:, axis]
        taps[rows, near + 1] = fraction[:, axis]
        along = [2 * reach + 1 if other == axis else 1 for other in range(len(part.reach))]
        out = out * taps[:, :-1].reshape(len(slots), *along)  # the last tap is always 0
    return torch.from_numpy(out)


def _index_of(conv: _ConvNd) -> Channels:
    if isinstance(conv, SelectConvNd):
        return cast(Channels, conv.index.cpu().numpy())
    return np.arange(conv.in_channels)
