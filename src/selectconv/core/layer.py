"""Section 2.2: the selective convolutional layer, in one, two and three dimensions.

`SelectConv(X; W) = Conv(SelectChannel(X); W)`. The allocation lives in four buffers and the `shift`
parameter, and nowhere else: nothing is cached, so loading, moving, copying or broadcasting them is
all it takes to move an allocation.
"""

from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from selectconv.checks import check_tensor
from selectconv.core import kernels
from selectconv.core.kernels import triton_select
from selectconv.core.mean_source import MeanSource, ObservedMean
from selectconv.core.shift import can_read, reroute
from selectconv.core.slots import SlottedConvNd

# Multiplies of a conv, forward and backward, in the time that copying one of its inputs takes.
_COPY_COST = 100


class SelectConvNd(SlottedConvNd):
    """What the three selective convolutions share; use `SelectConv1d`, `-2d` or `-3d`.

    The arguments are those of torch's convs; `reallocate=False` leaves the layer without a `shift`:
    it can close slots but not re-open them. With `groups`, a slot may read a channel of any group.
    """

    _plain_type: type[nn.modules.conv._ConvNd]
    # Whether the layer does all of SelectChannel; what only does a part cannot be compressed.
    is_whole = True

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
        if self.training and isinstance(self._mean_source, ObservedMean):
            self._observe(input)
        if not can_read(self.gate):
            # No look at the buffers' values: one graph serves every allocation.
            return self._convolve(self._reroute(input, self._rerouted()), self._open_weight())
        if triton_select.can_run(self._batched(input)):
            # Nor here, where a look would make the host wait for the GPU, layer by layer.
            return self._convolve(self._reroute(input, self._rerouted()), self._open_weight())
        any_closed, any_rerouted, any_shifted = self._read_allocation()
        if any_rerouted and kernels.can_run(self._batched(input)):
            if self._splits():
                return self._convolve_apart(input)
            return self._convolve_open(input, None, any_closed)
        if any_closed and self._gathers_open(input):
            return self._convolve_open(input, None, any_closed)
        weight = self._open_weight() if any_closed else self.weight
        if not any_shifted:
            weight = self._with_shift(weight)
        x = self._reroute(input, self._rerouted()) if any_rerouted else input
        return self._convolve(x, weight)

    def fuses(self, norm: nn.Module, x: Tensor) -> bool:
        """Tell whether `forward_norm_relu` can take `norm(x)` into its kernel.

        Not in a fresh layer, where it would save a little: that one computes exactly, to the last
        bit, what plain modules compute.
        """
        return (
            type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)
            and norm.weight is not None
            and norm.weight.dtype == torch.float32
            and norm.bias is not None
            and self._is_input(x)
            and x.ndim == self.weight.ndim
            and kernels.can_run(x)
            and x.numel() > x.shape[1]  # with one value a channel torch's batch norm refuses
            and not (self.training and isinstance(self._mean_source, ObservedMean))
            and not has_hooks(norm)
            and not has_hooks(self)
            and bool(self.gate.any())  # a conv needs an input
            and any(self._read_allocation())
        )

    def forward_norm_relu(self, x: Tensor, norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
        """Compute `self(relu(norm(x)))` with norm, ReLU and SelectChannel in one kernel.

        Closed slots are computed nowhere. Only where `fuses(norm, x)`.
        """
        return self._convolve_open(x, norm, self._read_allocation()[0])

    def select(self, x: Tensor) -> Tensor:
        """Rebuild an input (N, I, ...) as the conv sees it: SelectChannel of Section 2.2."""
        check_tensor("x", x, (None, self.in_channels, *[None] * self._num_axes))
        rebuilt = self._reroute(x, self._rerouted())
        # torch.where keeps the memory format; masked_fill makes its copy contiguous.
        return torch.where(self.gate.view(1, -1, *[1] * self._num_axes), rebuilt, 0.0)

    def _observe(self, x: Tensor) -> None:
        source = cast(ObservedMean, self._mean_source)
        batch = x if x.ndim == self.weight.ndim else x[None]
        source.observe(batch, self.observed_mean, self.observed_var, self.observed_batches)

    def _is_input(self, x: Tensor) -> bool:
        """Tell whether `x` is (N, I, ...) or unbatched (I, ...)."""
        axes = self._num_axes
        return x.ndim in (axes + 1, axes + 2) and x.shape[-axes - 1] == self.in_channels

    def _rerouted(self) -> Tensor:
        own = torch.arange(self.in_channels, device=self.index.device)
        return self.gate & (self.shifted | (self.index != own))

    def _reroute(self, x: Tensor, rerouted: Tensor) -> Tensor:
        if x.ndim == self.weight.ndim - 1:  # an unbatched input, which convs accept
            return self._reroute(x[None], rerouted)[0]
        shifted = None if self.shift is None else self.shifted & rerouted
        run = triton_select.select if triton_select.can_run(x) else reroute
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

    def _read_allocation(self) -> tuple[bool, bool, bool]:
        """Read whether any slot is closed, rerouted, shifted: in every forward, so not by torch."""
        buffers = [self.gate, self.shifted, self.index]
        if self.gate.device.type != "cpu":
            buffers = list(torch.stack([buffer.long() for buffer in buffers]).cpu())  # one transfer
        gate, shifted, index = (buffer.numpy() for buffer in buffers)
        gate, shifted = gate.astype(bool), (shifted & gate).astype(bool)
        rerouted = shifted | (gate & (index != np.arange(len(index))))
        return not gate.all(), bool(rerouted.any()), bool(shifted.any())

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.weight.ndim else x[None]

    def _gathers_open(self, x: Tensor) -> bool:
        """Tell whether copying the open channels costs less than convolving the closed ones."""
        if self.groups > 1 or not kernels.can_run(self._batched(x)):
            return False
        closed = self.in_channels - int(self.gate.sum())
        if closed == self.in_channels:
            return False  # a conv needs an input
        multiplies = self.weight[:, 0].numel() * closed
        return multiplies > _COPY_COST * (self.in_channels - closed)

    def _splits(self) -> bool:
        """Tell whether convolving the rerouted slots apart costs less than a copy of the input."""
        multiplies = self.weight[:, 0].numel() * int(self._rerouted().sum())
        return self.groups == 1 and multiplies < _COPY_COST * self.in_channels

    def _convolve_apart(self, x: Tensor) -> Tensor:
        """Convolve the input as it is, without a copy of it, and add the rerouted slots' part."""
        rerouted = self._rerouted()
        slots = rerouted.nonzero().flatten()
        keeps = (self.gate & ~rerouted).view(1, -1, *[1] * self._num_axes)
        own_weight = torch.where(keeps, self.weight, 0.0)
        batch = self._batched(x)
        batch, moved = kernels.tap(batch, rerouted, self.index, self.shift, self.shifted)
        if x.ndim != batch.ndim:
            batch, moved = batch[0], moved[0]
        forward = cast(Any, self)._conv_forward
        part: Tensor = forward(moved, self.weight.index_select(1, slots), None)
        return cast(Tensor, forward(batch, own_weight, self.bias).add_(part))

    def _convolve_open(
        self, x: Tensor, norm: nn.modules.batchnorm._BatchNorm | None, any_closed: bool
    ) -> Tensor:
        """Convolve in the kernels' way: what is closed is not there, in input and weight."""
        gate, weight = self.gate, self.weight
        if any_closed and self.groups == 1:
            weight = weight.index_select(1, gate.nonzero().flatten())
        elif any_closed:  # groups that differ in size are no conv
            gate, weight = torch.ones_like(gate), self._open_weight()
        allocation = (gate, self.index, self.shift, self.shifted)
        batch = self._batched(x)
        if norm is None:
            selected = kernels.select(batch, *allocation)
        else:
            selected = kernels.norm_relu_select(batch, norm, *allocation)
        return self._convolve(selected if x is batch else selected[0], weight)

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
