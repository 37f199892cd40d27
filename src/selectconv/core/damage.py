"""What closing a slot would do: E[X] of a layer's inputs, and the damage matrix (Section 2.1)."""

from typing import Any

import torch
from torch import Tensor, nn

from selectconv.checks import check_choice, check_flag
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.mean_source import ClosedForm, MeanSource, ObservedMean
from selectconv.errors import AllocationError, MeanSourceError

DAMAGES = ("auto", "mean", "rms")


def check_mean_source(name: str, source: MeanSource | None, inputs: int) -> None:
    """Check that a layer with `inputs` channels can read E[X] from `source`."""
    if source is None:
        return
    if not isinstance(source, ClosedForm | ObservedMean):
        raise TypeError(
            f"`{name}` must be a BatchNormMean, an ObservedMean or None, got {source!r}."
        )
    if source.num_channels not in (None, inputs):
        raise ValueError(
            f"`{name}` describes {source.num_channels} channels, the layer has {inputs} inputs."
        )


class DamageConvNd(nn.modules.conv._ConvNd):
    """A conv that knows the means of its inputs: the part of `SelectConvNd` that measures.

    Attributes:
        gate: (I,) bool buffer, g: the open slots.
        index: (I,) int64 buffer, pi: the channel that each slot reads.
    """

    gate: Tensor
    index: Tensor
    observed_mean: Tensor
    observed_var: Tensor
    observed_batches: Tensor
    _mean_source: MeanSource | None

    @property
    def mean_source(self) -> MeanSource | None:
        """Where E[X] comes from: a `BatchNormMean`, an `ObservedMean`, or None."""
        return self._mean_source

    @mean_source.setter
    def mean_source(self, source: MeanSource | None) -> None:
        check_mean_source("mean_source", source, self.in_channels)
        for name in ("observed_mean", "observed_var", "observed_batches"):
            self._buffers.pop(name, None)
        if isinstance(source, ObservedMean):
            zeros = self.weight.new_zeros(self.in_channels, dtype=torch.float32)
            self.register_buffer("observed_mean", zeros)
            self.register_buffer("observed_var", zeros.clone())
            batches = torch.zeros((), dtype=torch.int64, device=zeros.device)
            self.register_buffer("observed_batches", batches)
        self._mean_source = source

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mean_source":  # nn.Module would take in a module, past the property's checks
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def knows_mean(self) -> bool:
        """Return whether `input_mean` has an answer yet."""
        source = self._mean_source
        if isinstance(source, ObservedMean):
            return int(self.observed_batches) > 0
        return source is not None

    def input_mean(self) -> Tensor:
        """Compute E[X] of each selected input channel, (I,); 0 for closed slots.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
        """
        return self._input_moments()[0]

    def ecdm(self, normalized: bool = False, damage: str = "mean") -> Tensor:
        """Compute the damage of closing each slot, (I, O): Eq. (2) for "mean".

        Args:
            normalized: True returns nECDM, whose columns sum to 1.
            damage: "mean" (the paper), "rms", or "auto": mean if the input is known never to be
                negative, otherwise rms.

        Returns:
            The matrix. Rows of closed slots are zero.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
            ValueError: `damage` is unknown.
        """
        check_flag("normalized", normalized)
        check_choice("damage", damage, DAMAGES)
        with torch.no_grad():
            # Closed slots have moments 0, and so rows of zeros.
            mean, var = self._input_moments(variance=self._uses_rms(damage))
            if var is None:
                matrix = ecdm(self.weight.detach(), mean, self.groups)
            else:
                matrix = rms_damage(self.weight.detach(), mean, var, self.groups)
            return normalize_ecdm(matrix) if normalized else matrix

    def smallest_gamma(self, damage: str = "auto", protected: Tensor | None = None) -> float | None:
        """Return the smallest gamma at which `dealloc` would close a contributing slot.

        Slots without any damage, such as those that were just re-opened with weights of zero, do
        not count: every gamma closes them. Returns None if there is no other slot to close.

        Args:
            damage: as for `ecdm`.
            protected: (I,) bool, slots that must stay open.
        """
        by_group = self.gate.view(self.groups, -1)
        can_close = (by_group & (by_group.sum(dim=1, keepdim=True) > 1)).flatten()
        if protected is not None:
            can_close &= ~protected.to(can_close.device)
        if not bool(can_close.any()):
            return None
        largest = self.ecdm(normalized=True, damage=damage).amax(dim=1)
        largest = largest[can_close & (largest > 0)]
        return float(largest.min()) if len(largest) else None

    def _uses_rms(self, damage: str) -> bool:
        if damage == "auto":
            return self._mean_source is not None and not self._mean_source.is_nonnegative
        return damage == "rms"

    def _input_moments(self, variance: bool = False) -> tuple[Tensor, Tensor | None]:
        source = self._mean_source
        if source is None:
            raise MeanSourceError(
                "the layer does not know its input's mean: set `mean_source` to a BatchNormMean or "
                "an ObservedMean, or let sc.convert do so."
            )
        if isinstance(source, ClosedForm):
            mean, var = source.mean(), source.var() if variance else None
        elif int(self.observed_batches):
            mean, var = self.observed_mean, self.observed_var if variance else None
        else:
            raise MeanSourceError(
                "the layer has not seen any input yet: run it in training mode first."
            )
        return self._by_slot(mean), None if var is None else self._by_slot(var)

    def _by_slot(self, moment: Tensor) -> Tensor:
        return self._take_moment(moment, self.index)

    def _take_moment(self, moment: Tensor, index: Tensor) -> Tensor:
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        moment = moment.to(self.weight.device, exact)
        return moment[index].masked_fill(~self.gate, 0.0)

    def _finite_necdm(self, damage: str) -> Tensor:
        necdm = self.ecdm(normalized=True, damage=damage)
        # One NaN or infinity spoils its whole column, so a look at the first row finds it.
        if not bool(necdm[0].isfinite().all()):
            what = "weights" if bool(self.input_mean().isfinite().all()) else "input statistics"
            raise AllocationError(f"the layer's {what} hold NaN or infinite values.")
        return necdm


def split_groups(tensor: Tensor, groups: int) -> Tensor:
    """View (O, I / groups, ...), a weight's layout, as (groups, O / groups, I / groups, ...)."""
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])
