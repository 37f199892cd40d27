"""A summary of an allocation for forward passes, kept until the buffers change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """What forward passes need to know of gate, index and shifted, computed when these change.

    Attributes:
        content: the buffers' bytes.
        closed: how many slots are closed.
        rerouted: how many read anything but their own channel as it is.
        num_shifted: how many read with a shift.
        kept: the slots to compute: the open ones; None: all of them, since none is closed or since
            the conv has groups.
        index, shifted: what these slots read, on the CPU, for its kernel.
    """

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
    if not tensors[0].is_cpu:
        tensors = list(torch.stack([tensor.long() for tensor in tensors]).cpu())  # one transfer
    arrays: list[Any] = [tensor.numpy() for tensor in tensors]
    # Whoever wrote into the buffers, the same bytes say the same.
    content = tuple([array.tobytes() for array in arrays])
    if last is not None and last.content == content:
        return last
    return _summarize(content, groups, *arrays)


def _summarize(
    content: tuple[bytes, ...],
    groups: int,
    gate: npt.NDArray[np.bool_],
    shifted: npt.NDArray[np.bool_],
    index: npt.NDArray[np.int64],
) -> SlotSummary:
    gate, shifted = gate.astype(bool), (shifted & gate).astype(bool)
    rerouted = shifted | (gate & (index != np.arange(len(index))))
    kept = np.flatnonzero(gate) if groups == 1 else np.arange(len(index))
    with torch.inference_mode(False):  # or no training step could use them later
        return SlotSummary(
            content=content,
            closed=int(np.count_nonzero(~gate)),
            rerouted=int(np.count_nonzero(rerouted)),
            num_shifted=int(np.count_nonzero(shifted)),
            kept=None if len(kept) == len(index) else torch.from_numpy(kept),
            index=torch.from_numpy(index[kept].astype(np.int64)),
            shifted=torch.from_numpy(shifted[kept]),
        )
