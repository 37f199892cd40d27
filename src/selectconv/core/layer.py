"""Section 2.2: the selective convolutional layer, in one, two and three dimensions.

`SelectConv(X; W) = Conv(SelectChannel(X); W)`. The allocation lives in four buffers and the `shift`
parameter, and nowhere else, so loading, moving, copying or broadcasting them is all it takes to
move an allocation. (Forward passes keep a summary of them, `slot_summary`.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from selectconv.core import kernels
from selectconv.core.damage import check_mean_source
from selectconv.core.mean_source import MeanSource, ObservedMean
from selectconv.core.shift import can_read, reroute
from selectconv.core.slot_summary import SlotSummary, read_summary
from selectconv.core.slots import SlottedConvNd, living_layers
from selectconv.core.tensors import check_tensor

# Multiplies of a conv, forward and backward, in the time that copying one of its inputs takes.
_COPY_COST = 100


class SelectConvNd(SlottedConvNd):
    """What the three selective convolutions share; use `SelectConv1d`, `-2d` or `-3d`.

    The arguments are those of torch's convs, plus `reallocate`. With `reallocate=False` the layer
    has no `shift`: it can close slots, but not re-open them. With `groups`, a slot may read a
    channel of any group.
    """

    _plain_type: type[nn.modules.conv._ConvNd]
    _last_slots: SlotSummary | None = None

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
        """Make a selective layer that shares the weight and the bias of a plain conv.

        Hooks, training flag and all other attributes of `conv` are kept.

        Args:
            conv: a plain torch conv of this layer's dimension.
            reallocate: as for the layer.
            mean: the layer's `mean_source`.

        Raises:
            TypeError: `conv` has another type. Subclasses are refused, too: they may compute
                something else.
            TypeError, ValueError: `mean` is not a mean source, or describes another number of
                channels than `conv` reads.

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
            raise TypeError(
                "`conv` must have the forward of its type, got one with a patched forward."
            )
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
        """Convolve the selected input; `input` itself is never written into."""
        if not self._is_input(input):
            return self._convolve(input, self.weight)  # refuses it, in torch's words
        # Convs take unbatched inputs.
        x = input if input.ndim == self._num_axes + 2 else input[None]
        if self.training and isinstance(self._mean_source, ObservedMean):
            buffers = (self.observed_mean, self.observed_var, self.observed_batches)
            self._mean_source.observe(x, *buffers)
        out = self._choose_path(x)(x)
        return out if x is input else out[0]

    # Which path runs, and what it convolves; the result is the same.
    #
    # path        when                                                    convolves
    # every slot  the allocation's values cannot be read, or a GPU would  all slots, weights of
    #             wait for it: compiled models, torch.func, Triton        closed ones zero
    # masked      no kernel runs; or the layer is fresh; or no slot       the same, rerouting only
    #             reads another channel and few are closed                if a slot needs it
    # selected    a kernel runs, the input is smaller than the weight     a whole input, zeros for
    #             and copying weights costs more                          closed slots
    # open        a kernel runs and slots are rerouted or many closed     the open slots alone
    def _choose_path(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Choose how to compute."""
        kernel = self.find_kernel(x)
        # A kernel serves only what can be read.
        if not (can_read(self.gate) if kernel is None else kernel.READS_ALLOCATION):
            return partial(self._convolve_every_slot, kernel=kernel)
        slots = self._read_slots()
        if kernel is None or slots.is_fresh:
            return partial(self._convolve_masked, slots=slots)
        gathers, weight = self._gathers(slots), self.weight
        # Copying columns of a channels-last weight takes longer than convolving a few pixels.
        if x.numel() < weight.numel() and not (gathers and weight.is_contiguous()):
            return partial(self._convolve_selected, slots=slots)
        if slots.rerouted or gathers:
            return partial(self._convolve_open, slots=slots)
        return partial(self._convolve_masked, slots=slots)

    def find_kernel(self, x: Tensor) -> kernels.Kernel | None:
        """Return the kernel that serves an input, or None, also if the layer is on another device.

        Without a kernel torch says what is wrong with the devices; a kernel would read anything.
        """
        gate, here = cast(Tensor, self._buffers["gate"]), x.device  # self.gate takes long to find
        is_here = self.weight.device == here and gate.device == here
        return kernels.find_kernel(x) if is_here else None

    def select(self, x: Tensor) -> Tensor:
        """Select from an input (N, I, ...) what the conv reads: SelectChannel of Section 2.2."""
        check_tensor("x", x, (None, self.in_channels, *[None] * self._num_axes))
        return self._mask(self._reroute(x))

    def __getstate__(self) -> dict[str, Any]:
        state = cast(Any, super()).__getstate__()
        return {name: value for name, value in state.items() if name != "_last_slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, super()).__setstate__(state)
        living_layers.add(self)

    def _is_input(self, x: Tensor) -> bool:
        """Return whether `x` is (N, I, ...) or unbatched (I, ...)."""
        axes = self._num_axes
        return x.ndim in (axes + 1, axes + 2) and x.shape[-axes - 1] == self.in_channels

    def _reroute(self, x: Tensor, kernel: kernels.Kernel | None = None) -> Tensor:
        """SelectChannel without the gate: `x` (N, I, ...) as every slot reads it."""
        run = reroute if kernel is None else kernel.reroute
        shifted = None if self.shift is None else self.shifted & self.gate
        return run(x, self.index, self.shift, shifted)

    def _mask(self, x: Tensor) -> Tensor:
        """Close the closed slots of `x` (N, I, ...)."""
        # torch.where keeps the memory format; masked_fill makes its copy contiguous.
        return torch.where(self.gate.view(1, -1, *[1] * self._num_axes), x, 0.0)

    def _open_weight(self) -> Tensor:
        """Return the weight with zeros where slots are closed: cheaper than zeros in the input."""
        is_open = self.gate
        if self.groups > 1:
            by_group = is_open.view(self.groups, 1, -1)
            is_open = by_group.expand(-1, self.out_channels // self.groups, -1)
        shape = (-1, self.in_channels // self.groups, *[1] * self._num_axes)
        return torch.where(is_open.reshape(shape), self.weight, 0.0)

    def _tie_shift(self, weight: Tensor) -> Tensor:
        """Tie the shift to the output where nothing is shifted; the weight's values stay.

        In training every parameter gets a gradient (here: zeros), or DDP would wait for it.
        """
        if not torch.is_grad_enabled() or self.shift is None:
            return weight
        if not kernels.is_watched():
            return _Tied.apply(weight, self.shift)  # type: ignore[no-any-return, no-untyped-call]
        never = torch.zeros((), dtype=torch.bool, device=weight.device)
        return torch.where(never, self.shift.sum(), weight)

    def _read_slots(self) -> SlotSummary:
        """Read the allocation, and remember what it says."""
        slots = read_summary(self._buffers, self.groups, self._last_slots)
        if slots is not self._last_slots:  # setting an attribute of a module takes long
            self._last_slots = slots
        return slots

    def _gathers(self, slots: SlotSummary) -> bool:
        """Return whether copying the open channels costs less than convolving the closed ones."""
        open_slots = self.in_channels - slots.closed
        if self.groups > 1 or not open_slots:  # a conv needs an input
            return False
        multiplies = self.weight.numel() // self.in_channels * slots.closed
        return multiplies > _COPY_COST * open_slots

    def _convolve_every_slot(self, x: Tensor, kernel: kernels.Kernel | None) -> Tensor:
        """Convolve all slots, with weights of zero where they are closed."""
        return self._convolve(self._reroute(x, kernel), self._open_weight())

    def _convolve_masked(self, x: Tensor, slots: SlotSummary) -> Tensor:
        """Convolve in torch's operations, the input as it is if no slot reads another channel."""
        weight = self._open_weight() if slots.closed else self.weight
        if not slots.num_shifted:
            weight = self._tie_shift(weight)
        return self._convolve(self._reroute(x) if slots.rerouted else x, weight)

    def _convolve_selected(self, x: Tensor, slots: SlotSummary) -> Tensor:
        """Rebuild the whole input, with zeros for closed slots; the weight stays as it is."""
        weight = self.weight
        if slots.rerouted:
            x = self._reroute(x, kernels.cpu)
        else:
            weight = self._tie_shift(weight)
        return self._convolve(self._mask(x) if slots.closed else x, weight)

    def _convolve_open(
        self,
        x: Tensor,
        slots: SlotSummary,
        norm: nn.modules.batchnorm._BatchNorm | None = None,
    ) -> Tensor:
        """Convolve the open slots alone: closed ones are left out of input and weight."""
        weight: Tensor = self.weight
        shift: Tensor | None = self.shift
        if slots.kept is not None:
            weight = weight.index_select(1, slots.kept)
            shift = None if shift is None else shift.index_select(0, slots.kept)
        elif slots.closed:  # a conv cannot have groups of different sizes
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


class _Tied(torch.autograd.Function):
    """Returns a weight as it is, without a copy; in the backward pass the shift gets zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(shift)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (shift,) = ctx.saved_tensors
        return grad, torch.zeros_like(shift)
