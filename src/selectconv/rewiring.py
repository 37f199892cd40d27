"""What a selective conv becomes: plain convs whose outputs are added up.

Slots that read their channel as it is make up one conv, on the distinct channels that they read.
Shifted slots make up a second one. A bilinear shift is a small stencil, so it can be part of the
kernel, or a depthwise conv of its own in front.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.nn.modules.conv import _ConvNd

from selectconv.layer import SelectConvNd

Channels = npt.NDArray[np.int64]
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
    conv: _ConvNd, filters: Channels, available: Channels, spatial: Sequence[int]
) -> list[Part]:
    """Choose the plain convs that replace a conv.

    Args:
        conv: a plain or selective conv.
        filters: the filters to keep, equally many in each group of which any is kept.
        available: the channels that its input keeps, in order.
        spatial: the size of its input's maps.
    """
    groups = conv.groups
    in_use = np.unique(filters // (conv.out_channels // groups))
    by_group = filters.reshape(len(in_use), -1)
    slots = np.arange(conv.in_channels).reshape(groups, -1)[in_use]
    if not isinstance(conv, SelectConvNd):
        return [_as_they_are(conv, by_group, list(slots), available, np.arange(conv.in_channels))]
    gate, index = conv.gate.cpu().numpy(), conv.index.cpu().numpy()
    offset = shifts_of(conv)
    is_shifted = np.any(offset != 0, axis=1)
    # A shift out of the frame reads nothing but zeros.
    in_frame = np.all(np.abs(offset) < np.asarray(spatial), axis=1)
    still = [row[gate[row] & ~is_shifted[row]] for row in slots]
    moving = [row[gate[row] & is_shifted[row] & in_frame[row]] for row in slots]
    parts = []
    if any(map(len, still)) or not any(map(len, moving)):
        parts.append(_as_they_are(conv, by_group, still, available, index))
    if any(map(len, moving)):
        parts.append(_shifted(conv, by_group, moving, index, offset))
    return parts


def shifts_of(conv: SelectConvNd) -> npt.NDArray[np.float64]:
    """Read the shift of every slot, (I, axes); 0 where none applies."""
    if conv.shift is None:
        return np.zeros((conv.in_channels, len(conv.kernel_size)))
    shift = conv.shift.detach().cpu().double().numpy()
    return np.where(conv.shifted.cpu().numpy()[:, None], shift, 0.0)


def _as_they_are(
    conv: _ConvNd, filters: Channels, slots: list[Channels], available: Channels, index: Channels
) -> Part:
    sources = _stack([np.unique(index[row]) for row in slots])
    if sources.shape[1] == 0:  # all slots are closed: a conv needs an input, of weight zero
        sources = np.full((len(slots), 1), available[0])
    is_gathered = not np.array_equal(sources.reshape(-1), available)
    return Part(conv, filters, _stack(slots), sources, is_gathered)


def _shifted(
    conv: _ConvNd,
    filters: Channels,
    slots: list[Channels],
    index: Channels,
    offset: npt.NDArray[np.float64],
) -> Part:
    every = np.concatenate(slots)
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
