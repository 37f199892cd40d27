"""The authors' placement: SelectChannel before batch norm, which then has an entry for each slot.

The paper selects from the conv's input, after BN and ReLU, so that copies of a channel share its
statistics. The authors' code copies and shifts before BN: a re-allocated slot starts with the BN
entries of another slot that reads its channel and learns a scale and a bias of its own. To compare
the two (`create_model(placement="before-norm")`); only layers that re-allocate differ.

Two things stay ours. Outside the frame there are zeros, not the nearest pixel. And plans name a
channel, not one of the slots that read it, so the entries are those of the channel's own slot or,
where that is gone, of the first that reads it; the authors take the very slot that was drawn.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core import kernels
from selectconv.core.layer import SelectConv2d
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.plan import LayerPlan
from selectconv.errors import AllocationError


class SlotNormConv2d(SelectConv2d):
    """The conv of a `SlotNormReluConv`: it gets a channel for each slot, selected and normalised.

    Its `mean_source` must be the `BatchNormMean` of the block's norm, whose entries re-opened slots
    take over from a slot that reads the same channel.
    """

    selects_input = False

    def forward(self, input: Tensor) -> Tensor:
        """Convolve what the block has selected; of SelectChannel only the gate is left."""
        return self._convolve(input, self._tie_shift(self._open_weight()))

    def reroute(self, x: Tensor) -> Tensor:
        """SelectChannel without the gate, for the norm that comes next."""
        return self._reroute(x, kernels.find_kernel(x))

    def select(self, x: Tensor) -> Tensor:
        """Close the closed slots of the conv's input."""
        return self._mask(x)

    def slot_parameters(self) -> Iterator[Tensor]:
        """Yield the norm's parameters too."""
        yield from super().slot_parameters()
        yield from self._norm().parameters()

    def check_plan(self, plan: LayerPlan) -> None:
        """Check that there is a norm, too."""
        super().check_plan(plan)
        self._norm()

    @torch.no_grad()
    def apply_checked_plan(self, plan: LayerPlan) -> None:
        """Give each re-opened slot the norm's entries of a slot that reads the same channel."""
        donors = self._find_donors(plan)
        super().apply_checked_plan(plan)
        norm = self._norm()
        for entries in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            if entries is not None:
                device = entries.device
                entries[plan.opened.to(device)] = entries[donors.to(device)]

    def _find_donors(self, plan: LayerPlan) -> Tensor:
        """Find for each source an open slot that reads it: the channel's own, or else the first."""
        is_open = self.gate.cpu().index_fill(0, plan.closed, False)
        index = self.index.cpu()
        donors = []
        for channel in plan.source.tolist():
            readers = (is_open & (index == channel)).nonzero().flatten().tolist()
            donors.append(channel if channel in readers or not readers else readers[0])
        return torch.tensor(donors, dtype=torch.int64)

    def _by_slot(self, moment: Tensor) -> Tensor:
        # The norm's entries are the slots' own.
        own = torch.arange(self.in_channels, device=self.index.device)
        return self._take_moment(moment, own)

    def _norm(self) -> _BatchNorm:
        if not isinstance(self.mean_source, BatchNormMean):
            raise AllocationError(
                "a layer that selects before its norm needs that norm: set `mean_source` to its "
                "BatchNormMean."
            )
        return self.mean_source.bn


class SlotNormReluConv(nn.Sequential):
    """SelectChannel -> BN -> ReLU -> (dropout ->) conv, with a BN entry for each slot."""

    norm: nn.BatchNorm2d
    relu: nn.ReLU
    conv: SlotNormConv2d

    def forward(self, input: Tensor) -> Tensor:
        """Select, normalise, rectify and convolve."""
        return cast(Tensor, cast(Any, super()).forward(self.conv.reroute(input)))
