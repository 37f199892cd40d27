"""Section 2.2: the selective convolutional layer, in one, two and three dimensions.

`SelectConv(X; W) = Conv(SelectChannel(X); W)`. The allocation lives in four buffers and the `shift`
parameter, and nowhere else, so loading, moving, copying or broadcasting them is all it takes to
move an allocation. (What forward passes ask of them is kept beside the bytes that it came from.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selectconv.core import kernels
from selectconv.core.damage import check_mean_source
from selectconv.core.mean_source import MeanSource, ObservedMean
from selectconv.core.shift import can_read, reroute
from selectconv.core.slots import SlottedConvNd
from selectconv.core.tensors import check_tensor

# Multiplies of a conv, forward and backward, in the time that copying one of its inputs takes.
_COPY_COST = 100


@dataclass(frozen=True, slots=True)
class _Slots:
    """What a forward pass asks of gate, index and shifted: nothing but a function of their bytes.

    Attributes:
        closed: how many slots are closed.
        rerouted: how many read anything but their own channel as it is.
        num_shifted: how many read with a shift.
        kept: the slots to compute: the open ones; None: all, for there are no others, or in groups.
        index, shifted: what these slots read, on the CPU, for its kernel.
    """

    closed: int
    rerouted: int
    num_shifted: int
    kept: Tensor | None
    index: Tensor
    shifted: Tensor


class SelectConvNd(SlottedConvNd):
    """What the three selective convolutions share; use `SelectConv1d`, `-2d` or `-3d`.

    The arguments are those of torch's convs; `reallocate=False` leaves the layer without a `shift`:
    it can close slots but not re-open them. With `groups`, a slot may read a channel of any group.
    """

    _plain_type: type[nn.modules.conv._ConvNd]
    # Whether the layer does all of SelectChannel; what only does a part cannot be compressed.
    is_whole = True
    # The buffers' bytes when they were last read, and what they say.
    _last_slots: tuple[tuple[bytes, ...], _Slots] | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        reallocate: bool = True,
    ) -> None:
        # The next __init__ is that of nn.Conv1d, nn.Conv2d or nn.Conv3d, which all take the same.
        plain_init = cast(Any, super().__init__)
        plain_init(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._start_allocation(reallocate)

    @classmethod
    def from_conv(
        cls, conv: nn.Module, *, reallocate: bool = True, mean: MeanSource | None = None
    ) -> Self:
        """Make a selective layer that holds the very weight and bias of a plain conv.

        Hooks, training flag and everything else that is set on `conv` are taken over.

        Args:
            conv: a plain torch conv of this layer's dimension.
            reallocate: as for the layer.
            mean: the layer's `mean_source`.

        Raises:
            TypeError: `conv` is of another type; subclasses may compute something else.
            TypeError, ValueError: `mean` is no mean source, or does not have `conv`'s channels.

        Example:
            >>> import torch
            >>> conv = torch.nn.Conv2d(4, 8, 3)
            >>> SelectConv2d.from_conv(conv).weight is conv.weight
            True
        """
        if type(conv) is not cls._plain_type:
            wanted = f"torch.nn.{cls._plain_type.__name__}"
            raise TypeError(f"`conv` must be exactly a {wanted}, got {type(conv).__name__}.")
        if "weight" not in conv._parameters:
            raise TypeError("`conv` must own its weight, got one whose weight a hook recomputes.")
        if "forward" in vars(conv):
            raise TypeError("`conv` must compute as its type does, got one with a patched forward.")
        check_mean_source("mean", mean, conv.in_channels)
        layer = cls.__new__(cls)
        # The dicts of hooks are shared, so that the handles that users hold still remove them.
        layer.__dict__.update(conv.__dict__)
        layer.__dict__.pop("_compiled_call_impl", None)  # conv.compile(): it would run the conv
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            layer.__dict__[own] = conv.__dict__[own].copy()
        layer._start_allocation(reallocate)
        layer.mean_source = mean
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Convolve the rebuilt input; `input` itself is never written into."""
        if not self._is_input(input):
            return self._convolve(input, self.weight)  # refuses it, in torch's words
        x = input if input.ndim == self.weight.ndim else input[None]  # convs take unbatched inputs
        if self.training and isinstance(self._mean_source, ObservedMean):
            buffers = (self.observed_mean, self.observed_var, self.observed_batches)
            self._mean_source.observe(x, *buffers)
        out = self._choose_path(x)(x)
        self._report(lambda: x, out)
        return out if x is input else out[0]

    def _report(self, read: Callable[[], Tensor], out: Tensor) -> None:
        """Show a forward pass in training to those who gather statistics of it."""
        if self.statistics is not None and self.training and not torch.compiler.is_compiling():
            self.statistics.see(read, out)

    def _choose_path(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Choose how to compute: all of them compute the same."""
        kernel = kernels.find_kernel(x)
        if not can_read(self.gate) or not (kernel is None or kernel.READS_ALLOCATION):
            # No look at the buffers' values: one graph serves every allocation, and no GPU waits.
            return partial(self._convolve_every_slot, kernel=kernel)
        slots = self._read_slots()
        if kernel is None:
            return partial(self._convolve_masked, slots=slots)
        if not (slots.closed or slots.rerouted):
            return self._convolve_fresh
        gathers, weight = self._gathers(slots), self.weight
        # Single weights of channels last take longer to copy than few pixels to convolve.
        if x.numel() < weight.numel() and not (gathers and weight.is_contiguous()):
            return partial(self._convolve_selected, slots=slots)
        if slots.rerouted or gathers:
            return partial(self._convolve_open, slots=slots)
        return partial(self._convolve_masked, slots=slots)

    def forward_norm_relu(self, x: Tensor, norm: nn.Module) -> Tensor | None:
        """Compute `self(relu(norm(x)))` with norm, ReLU and SelectChannel in one kernel.

        Closed slots are computed nowhere. Returns None, and changes nothing, where that kernel
        cannot run; and for a fresh layer, where it would save a little: that one computes exactly,
        to the last bit, what plain modules compute.
        """
        if not (
            isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
            and type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)  # a subclass may compute otherwise
            and norm.weight is not None
            and norm.weight.dtype == torch.float32
            and norm.bias is not None
            and self._is_input(x)
            and x.ndim == self.weight.ndim
            and kernels.find_kernel(x) is kernels.cpu
            and x.numel() > x.shape[1]  # with one value a channel torch's batch norm refuses
            and not (self.training and isinstance(self._mean_source, ObservedMean))
            and not has_hooks(norm)
            and not has_hooks(self)
        ):
            return None
        slots = self._read_slots()
        is_fresh = not (slots.closed or slots.rerouted)
        if is_fresh or slots.closed == self.in_channels:  # a conv needs an input
            return None
        out = self._convolve_open(x, slots=slots, norm=norm)
        self._report(lambda: _norm_relu(x, norm), out)
        return out

    def select(self, x: Tensor) -> Tensor:
        """Rebuild an input (N, I, ...) as the conv sees it: SelectChannel of Section 2.2."""
        check_tensor("x", x, (None, self.in_channels, *[None] * self._num_axes))
        rebuilt = self._reroute(x)
        # torch.where keeps the memory format; masked_fill makes its copy contiguous.
        return torch.where(self.gate.view(1, -1, *[1] * self._num_axes), rebuilt, 0.0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last_slots"}

    def _is_input(self, x: Tensor) -> bool:
        """Tell whether `x` is (N, I, ...) or unbatched (I, ...)."""
        axes = self._num_axes
        return x.ndim in (axes + 1, axes + 2) and x.shape[-axes - 1] == self.in_channels

    def _reroute(self, x: Tensor, kernel: kernels.Kernel | None = None) -> Tensor:
        """SelectChannel without the gate: `x` (N, I, ...) as every slot reads it."""
        run = reroute if kernel is None else kernel.reroute
        shifted = None if self.shift is None else self.shifted & self.gate
        return run(x, self.index, self.shift, shifted)

    def _open_weight(self) -> Tensor:
        """The weight with zeros where slots are closed: cheaper than zeros in the input."""
        by_group = self.gate.view(self.groups, 1, -1)
        shape = (self.groups, self.out_channels // self.groups, -1)
        is_open = by_group.expand(shape).reshape(self.out_channels, -1)
        return torch.where(is_open.view(*is_open.shape, *[1] * self._num_axes), self.weight, 0.0)

    def _with_shift(self, weight: Tensor) -> Tensor:
        """Tie the shift to the output where nothing is shifted.

        In training every parameter gets a gradient (here: zeros), or DDP would wait for it.
        """
        if not torch.is_grad_enabled() or self.shift is None:
            return weight
        never = torch.zeros((), dtype=torch.bool, device=weight.device)
        return torch.where(never, self.shift.sum(), weight)

    def _read_slots(self) -> _Slots:
        """Read the allocation: in every forward, so with numpy, not torch."""
        buffers = [cast(Tensor, self._buffers[name]) for name in ("gate", "shifted", "index")]
        if not buffers[0].is_cpu:
            buffers = list(torch.stack([buffer.long() for buffer in buffers]).cpu())  # one transfer
        arrays: list[Any] = [buffer.numpy() for buffer in buffers]
        # Whoever wrote into the buffers, the same bytes say the same.
        content = tuple([array.tobytes() for array in arrays])
        if self._last_slots is None or self._last_slots[0] != content:
            self._last_slots = (content, _slots_of(self.groups, *arrays))
        return self._last_slots[1]

    def _gathers(self, slots: _Slots) -> bool:
        """Return whether copying the open channels costs less than convolving the closed ones."""
        open_slots = self.in_channels - slots.closed
        if self.groups > 1 or not open_slots:  # a conv needs an input
            return False
        multiplies = self.weight.numel() // self.in_channels * slots.closed
        return multiplies > _COPY_COST * open_slots

    def _convolve_every_slot(self, x: Tensor, kernel: kernels.Kernel | None) -> Tensor:
        """Convolve all slots, with weights of zero where they are closed."""
        return self._convolve(self._reroute(x, kernel), self._open_weight())

    def _convolve_masked(self, x: Tensor, slots: _Slots) -> Tensor:
        """Convolve in torch's operations, the input as it is if no slot reads another channel."""
        weight = self._open_weight() if slots.closed else self.weight
        if not slots.num_shifted:
            weight = self._with_shift(weight)
        return self._convolve(self._reroute(x) if slots.rerouted else x, weight)

    def _convolve_fresh(self, x: Tensor) -> Tensor:
        """Convolve as the plain conv does: every slot reads its own channel as it is."""
        if self.shift is None or not torch.is_grad_enabled():
            return self._convolve(x, self.weight)
        return self._convolve(x, _Tied.apply(self.weight, self.shift))  # type: ignore[no-untyped-call]

    def _convolve_selected(self, x: Tensor, slots: _Slots) -> Tensor:
        """Rebuild the whole input, with zeros for closed slots; the weight stays as it is."""
        weight = self.weight
        if slots.rerouted:
            x = self._reroute(x, kernels.cpu)
        elif self.shift is not None and torch.is_grad_enabled():
            weight = _Tied.apply(weight, self.shift)  # type: ignore[no-untyped-call]
        if slots.closed:
            x = torch.where(self.gate.view(1, -1, *[1] * self._num_axes), x, 0.0)
        return self._convolve(x, weight)

    def _convolve_open(
        self,
        x: Tensor,
        slots: _Slots,
        norm: nn.modules.batchnorm._BatchNorm | None = None,
    ) -> Tensor:
        """Convolve the open slots alone: what is closed is not there, in input and weight."""
        weight: Tensor = self.weight
        shift: Tensor | None = self.shift
        if slots.kept is not None:
            weight = weight.index_select(1, slots.kept)
            shift = None if shift is None else shift.index_select(0, slots.kept)
        elif slots.closed:  # groups that differ in size are no conv
            weight = self._open_weight()
        if norm is None:
            x = kernels.cpu.reroute(x, slots.index, shift, slots.shifted)
        else:
            x = kernels.cpu.norm_relu_reroute(x, norm, slots.index, shift, slots.shifted)
        return self._convolve(x, weight)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, self)._conv_forward(x, weight, self.bias))


class SelectConv1d(SelectConvNd, nn.Conv1d):
    """`nn.Conv1d` with channel selectivity; `shift` is (I, 1). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv1d(8, 4, kernel_size=3)(torch.zeros(1, 8, 10)).shape
        torch.Size([1, 4, 8])
    """

    _plain_type = nn.Conv1d


class SelectConv2d(SelectConvNd, nn.Conv2d):
    """`nn.Conv2d` with channel selectivity (Section 2.2): same arguments, plus `reallocate`.

    A fresh layer computes exactly what the plain conv computes.

    Example:
        >>> import selectconv as sc, torch
        >>> bn = torch.nn.BatchNorm2d(8)
        >>> conv = SelectConv2d(8, 4, kernel_size=1)
        >>> conv.mean_source = sc.BatchNormMean(bn, torch.relu)
        >>> with torch.no_grad():
        ...     _ = conv.weight[:, 2:4].zero_()
        >>> conv.dealloc(gamma=1e-3)
        tensor([2, 3])
        >>> conv.realloc()
        tensor([2, 3])
        >>> int(conv.moved.sum()), bool(conv.gate.all())
        (2, True)
    """

    _plain_type = nn.Conv2d


class SelectConv3d(SelectConvNd, nn.Conv3d):
    """`nn.Conv3d` with channel selectivity; `shift` is (I, 3). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv3d(8, 4, kernel_size=1)(torch.zeros(1, 8, 2, 3, 4)).shape
        torch.Size([1, 4, 2, 3, 4])
    """

    _plain_type = nn.Conv3d


def _norm_relu(x: Tensor, norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
    """Compute `relu(norm(x))` of a training step again, without a change to the norm."""
    known = (norm.running_mean, norm.running_var)
    by_batch = norm.training or known[0] is None
    mean, var = (None, None) if by_batch else known
    with torch.no_grad():
        normed = nn.functional.batch_norm(
            x, mean, var, norm.weight, norm.bias, training=by_batch, eps=norm.eps
        )
        return normed.relu_()


class _Tied(torch.autograd.Function):
    """A weight as it is, whose gradient brings zeros for the shift along; nothing is copied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(shift)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (shift,) = ctx.saved_tensors
        return grad, torch.zeros_like(shift)


def _slots_of(
    groups: int,
    gate: npt.NDArray[np.bool_],
    shifted: npt.NDArray[np.bool_],
    index: npt.NDArray[np.int64],
) -> _Slots:
    gate, shifted = gate.astype(bool), (shifted & gate).astype(bool)
    rerouted = shifted | (gate & (index != np.arange(len(index))))
    kept = np.flatnonzero(gate) if groups == 1 else np.arange(len(index))
    with torch.inference_mode(False):  # or no training step could use them later
        return _Slots(
            closed=int(np.count_nonzero(~gate)),
            rerouted=int(np.count_nonzero(rerouted)),
            num_shifted=int(np.count_nonzero(shifted)),
            kept=None if len(kept) == len(index) else torch.from_numpy(kept),
            index=torch.from_numpy(index[kept].astype(np.int64)),
            shifted=torch.from_numpy(shifted[kept]),
        )


def has_hooks(module: nn.Module) -> bool:
    """Tell whether someone watches or changes what goes in or out of a module."""
    every = nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )
