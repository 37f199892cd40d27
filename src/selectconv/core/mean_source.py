"""Where a layer gets E[X] and Var[X] of its input from: batch norm's parameters, or observation."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.checks import check_count, check_fraction, is_number
from selectconv.core.kernels import find_kernel
from selectconv.core.moments import Activation, expected_power, is_relu
from selectconv.errors import BadType, BadValue


class MeanSource:
    """Where a layer gets E[X] and Var[X] of its input from.

    Attributes:
        num_channels: how many channels the source describes; None: as many as the layer has.
        parts: the sources that it is made of.
        about: names the source, for people.
    """

    num_channels: int | None = None
    parts: tuple["ClosedForm", ...] = ()
    about: str

    def __repr__(self) -> str:
        return self.about

    @property
    def is_nonnegative(self) -> bool:
        """Whether the input is known never to be negative."""
        return bool(self.parts) and all(part.is_nonnegative for part in self.parts)

    def leaves(self) -> list["MeanSource"]:
        """Return what the source is made of in the end: itself, if it has no parts."""
        return [leaf for part in self.parts for leaf in part.leaves()] or [self]

    def batch_norms(self) -> list[_BatchNorm]:
        """Return the batch norms that the source reads."""
        return [leaf.bn for leaf in self.leaves() if isinstance(leaf, BatchNormMean)]


class ClosedForm(MeanSource):
    """A source that computes both moments from what the model holds: by default, from its parts.

    Attributes:
        is_found: whether `sc.convert` found it in the model's graph; else it was set by hand.
    """

    num_channels: int
    is_found = False

    def moment(self, power: int) -> Tensor:
        """Compute E[X] or, for a power of 2, E[X^2], (C,), in float64; of parts, on the CPU."""
        return torch.cat([part.moment(power).cpu() for part in self.parts])

    def mean(self) -> Tensor:
        """Compute E[X], (C,), in float64."""
        return self.moment(1)

    def var(self) -> Tensor:
        """Compute Var[X], (C,), in float64."""
        return (self.moment(2) - self.moment(1).square()).clamp(min=0.0)


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
        tensor([0.3989, 0.3989], dtype=torch.float64)
    """

    def __init__(self, bn: nn.Module, act: Activation | None) -> None:
        if not isinstance(bn, _BatchNorm):
            raise BadType(f"`bn` must be a batch norm, got {type(bn).__name__}.")
        if act is not None and not callable(act):
            raise BadType(f"`act` must be callable or None, got {act!r}.")
        self.bn = bn
        self.act = act
        self.num_channels = bn.num_features
        function = type(act) if isinstance(act, nn.Module) else act
        name = getattr(function, "__name__", repr(function))
        self.about = "batch norm" if act is None else f"batch norm + {name}"

    @property
    def is_nonnegative(self) -> bool:
        """Whether the activation is never negative, as far as a fine grid of inputs shows."""
        if self.act is None or is_relu(self.act):
            return self.act is not None
        # Far out and, in fine steps, where activations bend.
        grid = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -100.0, 100.0, 1e4])])
        like = self.bn.weight if self.bn.weight is not None else grid
        with torch.no_grad():
            value = self.act(grid[:, None].repeat(1, self.num_channels).to(like))
        return bool((value >= 0).all())

    @torch.no_grad()
    def moment(self, power: int) -> Tensor:
        """Compute E[act(N)^power], (C,), of the normal distribution N that the batch norm makes."""
        bn, none = self.bn, torch.zeros(self.num_channels)
        like = next((one for one in (bn.weight, bn.running_mean) if one is not None), none)
        gamma = torch.ones_like(like) if bn.weight is None else bn.weight.detach()  # affine=False
        beta = torch.zeros_like(like) if bn.bias is None else bn.bias.detach()  # from torch 2.13
        device = "cpu" if beta.device.type == "mps" else beta.device  # MPS has no float64
        beta, gamma = (parameter.to(device, torch.float64) for parameter in (beta, gamma))
        return expected_power(beta, gamma, self.act, power)


class ConstantMean(ClosedForm):
    """E[X] of channels that are constant, such as those that zero-padding appends.

    Example:
        >>> ConstantMean(0.0, num_channels=2).mean()
        tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, value: float, num_channels: int) -> None:
        if not is_number(value):
            raise BadType(f"`value` must be a number, got {value!r}.")
        self.value = float(value)
        self.num_channels = check_count("num_channels", num_channels, 1)
        self.about = f"constant {self.value:g}"

    @property
    def is_nonnegative(self) -> bool:
        """Whether the constant is not negative."""
        return self.value >= 0

    def moment(self, power: int) -> Tensor:
        """Return the constant's power, (C,)."""
        return torch.tensor(
            [self.value**power] * self.num_channels, dtype=torch.float64, device="cpu"
        )


class ConcatMean(ClosedForm):
    """E[X] of an input that concatenates other inputs along the channels.

    Example:
        >>> ConcatMean([ConstantMean(1.0, 1), ConstantMean(0.0, 2)]).mean()
        tensor([1., 0., 0.], dtype=torch.float64)
    """

    def __init__(self, parts: Sequence[ClosedForm]) -> None:
        is_list = isinstance(parts, list | tuple) and len(parts) > 0
        if not is_list or not all(isinstance(part, ClosedForm) for part in parts):
            raise BadType(f"`parts` must be a list of closed-form mean sources, got {parts!r}.")
        self.parts = tuple(parts)
        self.num_channels = sum(part.num_channels for part in parts)
        self.about = f"concat of {len(parts)}: {_kinds(self)}"


class SelectedMean(ClosedForm):
    """E[X] of an input that takes its channels from another one: a split, a shuffle, a slice.

    Args:
        part: the mean source of the other input.
        index: the channels to take, in their new order; a channel may be taken several times.

    Raises:
        TypeError, ValueError: `part` is not a mean source, or `index` not a list of its channels.

    Example:
        >>> both = ConcatMean([ConstantMean(1.0, 2), ConstantMean(0.0, 2)])
        >>> SelectedMean(both, [0, 2, 1, 3]).mean()
        tensor([1., 0., 1., 0.], dtype=torch.float64)
    """

    def __init__(self, part: ClosedForm, index: Sequence[int]) -> None:
        if not isinstance(part, ClosedForm):
            raise BadType(f"`part` must be a closed-form mean source, got {part!r}.")
        is_list = isinstance(index, list | tuple) and len(index) > 0
        if not is_list or not all(type(c) is int and 0 <= c < part.num_channels for c in index):
            raise BadValue(
                f"`index` must be a list of channels 0 to {part.num_channels - 1}, got {index!r}."
            )
        self.parts = (part,)
        self.index = list(index)
        self.num_channels = len(self.index)
        self.about = f"{len(self.index)} of {part.num_channels} channels: {_kinds(self)}"

    def moment(self, power: int) -> Tensor:
        """Take the channels' moments, (C,)."""
        return super().moment(power)[self.index]


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

    about = "observed"

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


def _kinds(source: MeanSource) -> str:
    return ", ".join(dict.fromkeys(leaf.about for leaf in source.leaves()))


def _moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count the values of a channel of `x` (N, C, ...); compute their means and variances, (C,)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // max(1, x.shape[1])
    if count == 0:
        nothing = x.new_zeros(x.shape[1])
        return 0, nothing, nothing
    kernel = find_kernel(x)
    if kernel is not None and kernel.moments is not None:
        return count, *kernel.moments(x)
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
