"""Where a layer gets E[X] and Var[X] of its input from: batch norm's parameters, or observation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.checks import as_plain, check_count, check_fraction, is_number
from selectconv.core import kernels
from selectconv.core.moments import (
    Activation,
    expected_activation,
    expected_square_activation,
    is_relu,
)


class MeanSource:
    """Where a layer gets E[X] and Var[X] of its input from; it may be made of other sources."""

    parts: tuple["ClosedForm", ...] = ()

    @property
    def num_channels(self) -> int | None:
        """The number of channels that the source describes; None: as many as the layer has."""
        return None

    @property
    def is_nonnegative(self) -> bool:
        """Whether the input is known never to be negative."""
        return False

    def batch_norms(self) -> Iterator[_BatchNorm]:
        """Yield the batch norms that the source reads."""
        for part in self.parts:
            yield from part.batch_norms()


class ClosedForm(MeanSource, ABC):
    """A source that computes both moments from what the model holds."""

    @property
    @abstractmethod
    def num_channels(self) -> int:
        """The number of channels that the source describes."""

    @abstractmethod
    def mean(self) -> Tensor:
        """Compute E[X], (C,)."""

    @abstractmethod
    def var(self) -> Tensor:
        """Compute Var[X], (C,)."""

    def _kinds(self) -> list[str]:
        """Name what the source is made of, each kind once."""
        kinds = dict.fromkeys(kind for part in self.parts for kind in part._kinds())
        return list(kinds) or [repr(self)]


class BatchNormMean(ClosedForm):
    """E[X] in closed form for an input `act(bn(.))`, assuming `bn(.) ~ N(bias, weight^2)` (Eq. 1).

    It reads the batch norm's current parameters. It is not a module, so it adds nothing to a
    `state_dict`. It is copied and pickled along with the model that contains it and the batch norm.

    Args:
        bn: the batch norm before the conv.
        act: the activation between them: a module, an elementwise callable, or None.

    Raises:
        TypeError: `bn` is not a batch norm, or `act` is not callable.

    Example:
        >>> import torch
        >>> BatchNormMean(torch.nn.BatchNorm2d(2), torch.relu).mean()
        tensor([0.3989, 0.3989])
    """

    def __init__(self, bn: nn.Module, act: Activation | None) -> None:
        if not isinstance(bn, _BatchNorm):
            raise TypeError(f"`bn` must be a batch norm, got {type(bn).__name__}.")
        if act is not None and not callable(act):
            raise TypeError(f"`act` must be callable or None, got {act!r}.")
        self.bn = bn
        self.act = act

    @property
    def num_channels(self) -> int:
        """The number of channels that the source describes."""
        return self.bn.num_features

    @property
    def is_nonnegative(self) -> bool:
        """Whether the activation is never negative, as far as a fine grid of inputs shows."""
        if self.act is None:
            return False
        if is_relu(self.act):
            return True
        bias, _ = self._normal()
        # Far out and, in fine steps, where activations bend.
        grid = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -100.0, 100.0, 1e4])])
        with torch.no_grad():
            value = self.act(grid[:, None].repeat(1, self.num_channels).to(bias))
        return bool((value >= 0).all())

    def mean(self) -> Tensor:
        """Compute E[X], (C,)."""
        with torch.no_grad():
            return expected_activation(*self._normal(), self.act)

    def var(self) -> Tensor:
        """Compute Var[X], (C,)."""
        with torch.no_grad():
            like = self._normal()[0]
            beta, gamma = (moment.cpu().double() for moment in self._normal())  # MPS has none
            first = expected_activation(beta, gamma, self.act)
            second = expected_square_activation(beta, gamma, self.act)
            return (second - first * first).clamp(min=0.0).to(like.dtype).to(like.device)

    def batch_norms(self) -> Iterator[_BatchNorm]:
        """Yield the batch norms that the source reads."""
        yield self.bn

    def _normal(self) -> tuple[Tensor, Tensor]:
        if self.bn.weight is None:  # affine=False: N(0, 1)
            like = self.bn.running_mean
            zeros = torch.zeros(self.num_channels) if like is None else torch.zeros_like(like)
            return zeros, zeros + 1
        return self.bn.bias.detach(), self.bn.weight.detach()

    def __repr__(self) -> str:
        name = self.act.__class__.__name__ if isinstance(self.act, nn.Module) else None
        act = name or getattr(self.act, "__name__", None if self.act is None else repr(self.act))
        return f"batch norm + {act}" if act else "batch norm"


class ConstantMean(ClosedForm):
    """E[X] of channels that are constant, such as those that zero-padding appends.

    Example:
        >>> ConstantMean(0.0, num_channels=2).mean()
        tensor([0., 0.])
    """

    def __init__(self, value: float, num_channels: int) -> None:
        value = as_plain(value)
        if not is_number(value):
            raise TypeError(f"`value` must be a number, got {value!r}.")
        self.value = float(value)
        self._num_channels = check_count("num_channels", num_channels, 1)

    @property
    def num_channels(self) -> int:
        """The number of channels that hold the constant."""
        return self._num_channels

    @property
    def is_nonnegative(self) -> bool:
        """Whether the constant is not negative."""
        return self.value >= 0

    def mean(self) -> Tensor:
        """Return the constant, (C,)."""
        return torch.full((self.num_channels,), self.value)

    def var(self) -> Tensor:
        """Return zeros, (C,)."""
        return torch.zeros(self.num_channels)

    def __repr__(self) -> str:
        return f"constant {self.value:g}"


class _CombinedMean(ClosedForm):
    """E[X] of channels that come from other sources, the parts."""

    @property
    def is_nonnegative(self) -> bool:
        """Whether no part is ever negative."""
        return all(part.is_nonnegative for part in self.parts)

    def mean(self) -> Tensor:
        """Compute E[X], (C,)."""
        return self._combine([part.mean() for part in self.parts])

    def var(self) -> Tensor:
        """Compute Var[X], (C,)."""
        return self._combine([part.var() for part in self.parts])

    @abstractmethod
    def _combine(self, moments: list[Tensor]) -> Tensor:
        """Arrange a moment of each part, (C,)."""


class ConcatMean(_CombinedMean):
    """E[X] of an input that concatenates other inputs along the channels.

    Example:
        >>> ConcatMean([ConstantMean(1.0, 1), ConstantMean(0.0, 2)]).mean()
        tensor([1., 0., 0.])
    """

    def __init__(self, parts: Sequence[ClosedForm]) -> None:
        if not isinstance(parts, list | tuple) or not all(
            isinstance(part, ClosedForm) for part in parts
        ):
            raise TypeError(f"`parts` must be a list of closed-form mean sources, got {parts!r}.")
        if not parts:
            raise ValueError("`parts` must hold at least one mean source, got none.")
        self.parts = tuple(parts)

    @property
    def num_channels(self) -> int:
        """The number of channels that the source describes."""
        return sum(part.num_channels for part in self.parts)

    def _combine(self, moments: list[Tensor]) -> Tensor:
        like = next((m for m in moments if m.device.type != "cpu"), moments[0])
        return torch.cat([moment.to(like) for moment in moments])

    def __repr__(self) -> str:
        return f"concat of {len(self.parts)}: {', '.join(self._kinds())}"


class SelectedMean(_CombinedMean):
    """E[X] of an input that takes its channels from another one: a split, a shuffle, a slice.

    Args:
        part: the mean source of the other input.
        index: the channels to take, in their new order; a channel may be taken several times.

    Raises:
        ValueError: `index` is empty, or names channels that `part` does not have.

    Example:
        >>> both = ConcatMean([ConstantMean(1.0, 2), ConstantMean(0.0, 2)])
        >>> SelectedMean(both, [0, 2, 1, 3]).mean()
        tensor([1., 0., 1., 0.])
    """

    def __init__(self, part: ClosedForm, index: Sequence[int]) -> None:
        if not isinstance(part, ClosedForm):
            raise TypeError(f"`part` must be a closed-form mean source, got {part!r}.")
        if not isinstance(index, list | tuple) or not all(type(one) is int for one in index):
            raise TypeError(f"`index` must be a list of integers, got {index!r}.")
        outside = [channel for channel in index if not 0 <= channel < part.num_channels]
        if outside or not index:
            raise ValueError(
                f"`index` must name channels 0 to {part.num_channels - 1}, got {outside[:5]}."
            )
        self.part = part
        self.parts = (part,)
        self.index = tuple(index)

    @property
    def num_channels(self) -> int:
        """The number of channels that the source describes."""
        return len(self.index)

    def _combine(self, moments: list[Tensor]) -> Tensor:
        (moment,) = moments
        return moment[torch.tensor(self.index, device=moment.device)]

    def __repr__(self) -> str:
        kinds = ", ".join(self._kinds())
        return f"{self.num_channels} of {self.part.num_channels} channels: {kinds}"


class ObservedMean(MeanSource):
    """E[X] and Var[X] as observed in training: running moments of the layer's input.

    The layer keeps them in its buffers `observed_mean`, `observed_var` and `observed_batches`, so
    they are saved and restored with the model. The first `1 / momentum` batches are averaged
    evenly; after that, older batches fade exponentially.

    In a process group the batches of all ranks are pooled, so all ranks have the same moments. As
    with `nn.SyncBatchNorm`, all ranks must then run the layer equally often in training.

    Args:
        momentum: the weight of a new batch in the long run.
        pooled: False lets each rank observe its own batches only, without waiting for the others.

    Raises:
        TypeError, ValueError: `momentum` is not in [0, 1].

    Example:
        >>> import selectconv as sc, torch
        >>> conv = sc.SelectConv2d(2, 3, 1)
        >>> conv.mean_source = ObservedMean()
        >>> _ = conv(torch.ones(1, 2, 4, 4))
        >>> conv.input_mean()
        tensor([1., 1.])
    """

    def __init__(self, momentum: float = 0.1, *, pooled: bool = True) -> None:
        self.momentum = check_fraction("momentum", momentum)
        self.pooled = bool(pooled)

    @torch.no_grad()
    def observe(self, x: Tensor, mean: Tensor, var: Tensor, batches: Tensor) -> None:
        """Fold a batch `x` (N, C, ...) into the running moments, in place."""
        count, batch_mean, batch_var = _moments(x.detach())
        is_seen: bool | Tensor = count > 0
        if self.pooled and dist.is_available() and dist.is_initialized():
            # Also with an empty batch: the other ranks wait for it.
            is_seen, batch_mean, batch_var = _pool(count, batch_mean, batch_var)
        elif count == 0:
            return
        batches += is_seen
        share = torch.clamp(1.0 / batches.clamp(min=1).to(batch_mean), min=self.momentum) * is_seen
        step = batch_mean - mean
        # The variance of the mixture, not the mean of the variances: batches differ in their mean.
        var.copy_((1 - share) * (var + share * step * step) + share * batch_var)
        mean.copy_(mean + share * step)

    def __repr__(self) -> str:
        return "observed"


def _moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count the values of a channel of `x` (N, C, ...); compute their means and variances, (C,)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // max(1, x.shape[1])
    if count == 0:
        nothing = x.new_zeros(x.shape[1])
        return 0, nothing, nothing
    if kernels.cpu.can_run(x):
        return count, *kernels.cpu.moments(x)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    var, mean = torch.var_mean(x, dim=axes, correction=0)
    return count, mean, var


def _pool(count: int, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pool moments over all ranks; also return, as a tensor, whether any rank had values."""
    exact = mean.to(torch.float64)  # a difference of squares follows
    square = var.to(torch.float64) + exact * exact
    sums = torch.cat([exact.new_ones(1), exact, square]) * count
    dist.all_reduce(sums)
    total = sums[:1].clamp(min=1)
    first, second = (sums[1:] / total).chunk(2)
    pooled_var = (second - first * first).clamp(min=0.0)
    return sums[0] > 0, first.to(mean), pooled_var.to(var)
