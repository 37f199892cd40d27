"""A summary of an allocation for forward passes, kept until the buffers change."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A tensor, the address of its memory, and an array of the same memory, which keeps it in place.
_View = tuple[Tensor, int, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """What forward passes need to know of gate, index and shifted, computed when these change.

    Attributes:
        views: of each buffer on the CPU, the tensor, where its memory is, and that memory.
        content: the buffers' bytes.
        closed: how many slots are closed.
        rerouted: how many read anything but their own channel as it is.
        num_shifted: how many read with a shift.
        kept: the slots to compute: the open ones; None: all of them, since none is closed or since
            the conv has groups.
        index, shifted: what these slots read, on the CPU, for its kernel.
    """

    views: tuple[_View, ...]
    content: tuple[bytes, ...]
    closed: int
    rerouted: int
    num_shifted: int
    kept: Tensor | None
    index: Tensor
    shifted: Tensor

    @property
    def is_fresh(self) -> bool:
        """Whether every slot reads its own channel as it is."""
        return not (self.closed or self.rerouted)


def read_summary(
    buffers: Mapping[str, Tensor | None], groups: int, last: SlotSummary | None
) -> SlotSummary:
    """Summarize a layer's allocation; return `last` itself where the buffers hold its bytes.

    It is called in every forward, so it works with numpy, not torch.
    """
    tensors = [cast(Tensor, buffers[name]) for name in ("gate", "shifted", "index")]
    if last is not None and _are_same(tensors, last.views):
        views = last.views
    else:
        if not tensors[0].is_cpu:
            tensors = list(torch.stack([tensor.long() for tensor in tensors]).cpu())  # one transfer
        views = tuple([(tensor, tensor.data_ptr(), tensor.numpy()) for tensor in tensors])
    # Whoever wrote into the buffers, the same bytes say the same.
    content = tuple([array.tobytes() for _, _, array in views])
    if last is not None and last.content == content:
        return last if last.views is views else replace(last, views=views)
    return _summarize(views, content, groups)


def _are_same(tensors: list[Tensor], views: tuple[_View, ...]) -> bool:
    """Return whether arrays show the memory of these tensors: making them anew takes longer."""
    for tensor, (seen, address, _) in zip(tensors, views, strict=True):
        if tensor is not seen or tensor.data_ptr() != address:
            return False
    return True


def _summarize(views: tuple[_View, ...], content: tuple[bytes, ...], groups: int) -> SlotSummary:
    gate, shifted, index = (array for _, _, array in views)
    gate, shifted = gate.astype(bool), (shifted & gate).astype(bool)
    rerouted = shifted | (gate & (index != np.arange(len(index))))
    kept = np.flatnonzero(gate) if groups == 1 else np.arange(len(index))
    with torch.inference_mode(False):  # or no training step could use them later
        return SlotSummary(
            views=views,
            content=content,
            closed=int(np.count_nonzero(~gate)),
            rerouted=int(np.count_nonzero(rerouted)),
            num_shifted=int(np.count_nonzero(shifted)),
            kept=None if len(kept) == len(index) else torch.from_numpy(kept),
            index=torch.from_numpy(index[kept].astype(np.int64)),
            shifted=torch.from_numpy(shifted[kept]),
        )
