"""Beyond the paper: re-opened slots read the channels and offsets that lower the loss most.

From the sums of `gradients`, what the layer reads already is taken out, by orthogonal least squares
among the slots phi that read the same channel, with R from the channel's autocovariance:

    num = a[z] - k' (R + lambda)^-1 a[phi],   den = R(z, z) - k' (R + lambda)^-1 k,   k = R(phi, z)
    gain[z] = sum over outputs of num_even * num_odd / den

The best candidate is taken, the others of its channel are scored anew, and so on; a slot whose best
gain is not positive stays closed. Dimensions are those of `gradients`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selectconv.core.gradients import LAGS, GradientStatistics

_RIDGE = 1e-3  # lambda, as a part of the channel's variance
_NOVEL = 0.05  # candidates with a smaller share of new variance are left out


def choose_by_gradient(
    statistics: GradientStatistics, gate: Tensor, max_copies: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose what the closed slots of a layer are to read.

    Args:
        statistics: of the layer; without a watched pass, nothing is chosen.
        gate: (I,) bool on the CPU, the open slots.
        max_copies: as for `choose_sources`.

    Returns:
        The slots to re-open, the channels they are to read, their shifts (B, axes), and the gain of
        every candidate before anything was chosen, (groups, channels, offsets).
    """
    layer = statistics.layer
    width = layer.in_channels // layer.groups
    searches: list[_Search] = []
    if statistics.passes:
        evidence = _weigh(statistics)
        searches = [_Search(evidence, gate, group) for group in range(layer.groups)]
    gains = [search.gain.float() for search in searches]
    slots, sources, shifts = [], [], []
    copies = torch.bincount(layer.index.cpu()[gate], minlength=layer.in_channels)
    for slot in (~gate).nonzero().flatten().tolist() if searches else ():
        search = searches[slot // width]
        if max_copies is not None:  # N counts the slots of all groups
            search.gain[copies > max_copies] = 0.0
        found = search.take()
        if found is not None:
            copies[found[0]] += 1
            slots.append(slot)
            sources.append(found[0])
            shifts.append(found[1])
    shape = (0, layer.in_channels, len(statistics.offsets))
    return (
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(sources, dtype=torch.int64),
        torch.stack(shifts).float() if shifts else torch.empty(0, len(layer.kernel_size)),
        torch.stack(gains) if gains else torch.empty(shape),
    )


class _Evidence(NamedTuple):
    """What was seen of a layer, centred, and what its slots read; in float64 on the CPU.

    Attributes:
        offsets: (F, axes), of the candidates.
        covariance: (c, lags), each channel's autocovariance.
        candidates: (2, groups, rows, c, F), the gradients of candidates' weights.
        slots: (2, groups, rows, I), those of the slots' weights.
        source: (I,), the channels that the slots read.
        shift: (I, axes), at which shifts.
    """

    offsets: Tensor
    covariance: Tensor
    candidates: Tensor
    slots: Tensor
    source: Tensor
    shift: Tensor


def _weigh(statistics: GradientStatistics) -> _Evidence:
    """Bring the sums of a layer into the form that a search needs."""
    layer: Any = statistics.layer
    sums = {name: value.cpu().double() for name, value in statistics.sums.items()}
    offsets, index = statistics.offsets, layer.index.cpu()
    mean = sums["mean"] / sums["images"]
    covariance = (sums["covariance"] / sums["images"]).flatten(1) - mean.square()[:, None]
    # Centred: batch norm, or a bias, takes care of an output's mean.
    lift = sums["outputs"][..., None] * mean
    candidates = sums["candidates"] - lift[..., None]
    zero = int((offsets == 0).all(dim=1).nonzero())
    slots = torch.where(
        layer.rerouted().cpu(), sums["slots"] - lift[..., index], candidates[..., index, zero]
    )
    shift = torch.zeros(layer.in_channels, offsets.shape[1], dtype=torch.float64)
    if layer.shift is not None:
        shifted = layer.shifted.cpu()
        shift[shifted] = layer.shift.detach().cpu().double()[shifted]
    return _Evidence(offsets, covariance, candidates, slots, index, shift)


class _Search:
    """The candidates of one group of a layer, and what the group reads of each channel."""

    def __init__(self, evidence: _Evidence, gate: Tensor, group: int) -> None:
        self.offsets, self.covariance = evidence.offsets, evidence.covariance
        self.candidates = evidence.candidates[:, group]  # 2, rows, c, F
        num_channels, groups = len(evidence.source), evidence.candidates.shape[1]
        width = num_channels // groups
        self.readers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_channels)]
        for slot in range(group * width, (group + 1) * width):
            if bool(gate[slot]):
                reader = (evidence.shift[slot], evidence.slots[:, group, :, slot])
                self.readers[int(evidence.source[slot])].append(reader)
        self.gain = torch.zeros(num_channels, len(self.offsets), dtype=torch.float64)
        by_size: dict[int, list[int]] = {}
        for channel, readers in enumerate(self.readers):
            by_size.setdefault(len(readers), []).append(channel)
        for channels in by_size.values():
            self._score(channels)

    def take(self) -> tuple[int, Tensor] | None:
        """Take the best candidate: its channel and offset; None if no candidate gains anything."""
        channel, place = divmod(int(self.gain.argmax()), len(self.offsets))
        if float(self.gain[channel, place]) <= 0:
            return None
        reader = (self.offsets[place], self.candidates[..., channel, place])
        self.readers[channel].append(reader)
        self._score([channel])
        self.gain[channel, place] = 0.0
        return channel, self.offsets[place]

    def _score(self, channels: list[int]) -> None:
        """Compute the gains of these channels, which have equally many readers."""
        covariance = self.covariance[channels]
        variance = covariance[:, covariance.shape[1] // 2]  # at lag zero
        wanted = self.candidates[:, :, channels]  # 2, rows, channels, F
        novel = variance[:, None].expand(-1, len(self.offsets))
        readers = [self.readers[channel] for channel in channels]
        if readers[0]:
            shift = torch.stack([torch.stack([at for at, _ in read]) for read in readers])
            rows = [torch.stack([row for _, row in read], dim=-1) for read in readers]
            offsets = self.offsets.expand(len(channels), *self.offsets.shape)
            between = _covariances(covariance, shift, shift)
            ridge = (_RIDGE * variance).clamp(min=torch.finfo(torch.float64).tiny)
            between = between + torch.diag_embed(ridge[:, None].expand(-1, shift.shape[1]))
            across = _covariances(covariance, shift, offsets)  # channels, readers, F
            share = torch.linalg.solve(between, across)
            novel = novel - (across * share).sum(dim=1)
            known = torch.einsum("hrcm,cmf->hrcf", torch.stack(rows, dim=2), share)
            wanted = wanted - known
        gain = (wanted[0] * wanted[1]).sum(dim=0) / novel
        is_new = (novel > _NOVEL * variance[:, None]) & (variance[:, None] > 0)
        self.gain[channels] = torch.where(is_new, gain, 0.0)


def _covariances(covariance: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Compute the covariances of shifted copies of a channel, from its autocovariance.

    Args:
        covariance: (C, lags), as `autocovariance` returns it, flattened.
        one: (C, m, axes), shifts in pixels; a shift in between is a bilinear mixture.
        other: (C, n, axes).

    Returns:
        (C, m, n).
    """
    pairs = torch.ones(*one.shape[:2], other.shape[1], 1, dtype=covariance.dtype)
    lags = torch.arange(-LAGS, LAGS + 1)
    for axis in range(one.shape[2]):
        a, b = one[..., axis, None], other[..., None, :, axis]
        whole, part_a, part_b = b.floor() - a.floor(), a - a.floor(), b - b.floor()
        # Each copy reads two pixels, so a pair meets at three lags.
        steps = torch.stack([whole - 1, whole, whole + 1], dim=-1).clamp(-LAGS, LAGS)
        shares = torch.stack(
            [
                part_a * (1 - part_b),
                (1 - part_a) * (1 - part_b) + part_a * part_b,
                (1 - part_a) * part_b,
            ],
            dim=-1,
        )
        along = (shares[..., None] * (steps[..., None] == lags)).sum(dim=-2)  # C, m, n, lags
        pairs = (pairs[..., :, None] * along[..., None, :]).flatten(-2)
    return torch.einsum("cmnl,cl->cmn", pairs, covariance)
