"""SelectChannel on the CPU in C, alone or fused with the batch norm and ReLU before it.

Autograd sees one operation with a hand-written backward: no scatter, no atomics, deterministic.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core.kernels.build import load_kernel
from selectconv.core.kernels.kernel import Kernel, differentiable_grads
from selectconv.core.shift import memory_format
from selectconv.core.shift import reroute as define

_BAD_INDEX = 2  # of select.c


class _Shape(ctypes.Structure):
    """`Shape` of select.c: sizes, layout and the allocation."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("images", "channels", "height", "width", "slots")),
        *((name, ctypes.c_int32) for name in ("channels_last", "axes", "threads")),
        *((name, ctypes.c_void_p) for name in ("shifted", "index", "shift")),
    ]


def can_run(x: Tensor) -> bool:
    """Return whether the C kernel serves an input: float32 with one or two dense spatial axes."""
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.ndim in (3, 4)
        and x.is_contiguous(memory_format=memory_format(x))
        and load_kernel().library is not None
    )


def find_obstacle(device: torch.device) -> str | None:
    """Say why the kernel cannot serve a device; "": it is meant for others; None: it serves it."""
    if device.type != "cpu":
        return ""
    built = load_kernel()
    return built.about if built.library is None else None


# Of batch norm: mean, 1 / standard deviation, eps, whether they are the batch's own.
_Statistics = tuple[Tensor, Tensor, float, bool]


def reroute(x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None) -> Tensor:
    """Compute `core.shift.reroute(x, index, shift, shifted)`."""
    return _run(x, None, None, shift, shifted, index, None)


def norm_relu_reroute(
    norm: _BatchNorm, x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None
) -> Tensor:
    """Compute `reroute(relu(norm(x)), ...)` in one pass over `x`; updates the norm's statistics."""
    if norm.training or norm.running_mean is None or norm.running_var is None:
        mean, var = moments(x)
        _update_running(norm, mean, var, x.numel() // x.shape[1])
    else:
        mean, var = norm.running_mean, norm.running_var
    statistics = (mean, torch.rsqrt(var + norm.eps), norm.eps, mean is not norm.running_mean)
    return _run(x, norm.weight, norm.bias, shift, shifted, index, statistics)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance (not the unbiased one) of each channel of `x` (N, C, ...)."""
    mean, var = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    _call("channel_moments", _describe(x), x, mean, var)
    return mean, var


def _run(*inputs: Any) -> Tensor:
    """Compute `_select`, with derivatives where they may be wanted: they take longer to prepare."""
    if torch.is_grad_enabled():
        return _Reroute.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    return _select(*inputs)[0]


def _select(
    x: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    shift: Tensor | None,
    shifted: Tensor | None,
    index: Tensor,
    statistics: _Statistics | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Call the kernel; returns its output, and what it was called with, for the backward."""
    index = index.contiguous()
    shifted = None if shifted is None else shifted.contiguous()
    if shift is not None and not (shift.dtype == torch.float32 and shift.is_contiguous()):
        shift = shift.to(torch.float32).contiguous()
    scale = offset = None
    if statistics is not None and bn_weight is not None and bn_bias is not None:
        scale = bn_weight * statistics[1]
        offset = torch.addcmul(bn_bias, statistics[0], scale, value=-1)
    size = (x.shape[0], index.numel(), *x.shape[2:])
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    shape = _describe(x, index, shift, shifted)
    _call("select_forward", shape, x, scale, offset, out)
    return out, shift, shifted, index, scale, offset


class _Reroute(torch.autograd.Function):
    """Inputs: x, batch norm's weight and bias, shift; then what has no derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        shift: Tensor | None,
        shifted: Tensor | None,
        index: Tensor,
        statistics: _Statistics | None,
    ) -> Tensor:
        mean, inverse, ctx.eps, ctx.is_batch = statistics or (None, None, 0.0, False)
        out, *called_with = _select(x, bn_weight, bn_bias, shift, shifted, index, statistics)
        ctx.save_for_backward(x, bn_weight, bn_bias, *called_with, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing unpacks a tensor only once
        x, bn_weight, bn_bias, shift, shifted, index = saved[:6]
        scale, offset, mean, inverse = saved[6:]
        if torch.is_grad_enabled():  # a derivative of this derivative is wanted
            inputs = (x, bn_weight, bn_bias, shift)
            out = _definition(ctx, *inputs, shifted, index, mean, inverse)
            grads = differentiable_grads(out, inputs, ctx.needs_input_grad[:4], grad)
            return (*grads, None, None, None)
        grad = grad.contiguous(memory_format=memory_format(x))
        grad_x = torch.empty_like(x)
        grad_shift = None if shift is None else torch.empty_like(shift)
        sums = None if scale is None else x.new_empty(x.shape[1], 2)
        shape = _describe(x, index, shift, shifted)
        _call("select_backward", shape, x, scale, offset, mean, grad, grad_x, sums, grad_shift)
        grad_weight = grad_bias = None
        if sums is not None:
            grad_bias, grad_weight = sums[:, 0], sums[:, 1] * inverse
            lift = tilt = torch.zeros_like(scale)
            if ctx.is_batch:  # the batch's own statistics depend on x as well
                count = x.numel() // x.shape[1]
                lift, tilt = grad_bias / count, grad_weight * inverse / count
            _call("norm_backward", shape, x, scale, mean, lift, tilt, grad_x)
        return grad_x, grad_weight, grad_bias, grad_shift, None, None, None


def _definition(
    ctx: Any,
    x: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    shift: Tensor | None,
    shifted: Tensor | None,
    index: Tensor,
    mean: Tensor | None,
    inverse: Tensor | None,
) -> Tensor:
    """The same in torch's operations, which can be differentiated again."""
    if mean is not None and inverse is not None:
        if ctx.is_batch:
            x = F.batch_norm(x, None, None, bn_weight, bn_bias, training=True, eps=ctx.eps)
        else:
            var = inverse.pow(-2) - ctx.eps
            x = F.batch_norm(x, mean, var, bn_weight, bn_bias, eps=ctx.eps)
        x = F.relu(x)
    return define(x, index, shift, shifted)


@torch.no_grad()
def _update_running(norm: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    mean_so_far, var_so_far, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean_so_far is None or var_so_far is None or batches is None or not norm.track_running_stats:
        return
    batches.add_(1)
    weight = norm.momentum if norm.momentum is not None else 1.0 / float(batches)
    mean_so_far.lerp_(mean, weight)
    var_so_far.lerp_(var * (count / (count - 1)), weight)  # torch keeps the unbiased one


def _describe(
    x: Tensor,
    index: Tensor | None = None,
    shift: Tensor | None = None,
    shifted: Tensor | None = None,
) -> _Shape:
    images, channels, *height, width = x.shape
    slots = 0 if index is None else index.numel()
    sizes = (images, channels, height[0] if height else 1, width, slots)
    flags = (not x.is_contiguous(), x.ndim - 2, torch.get_num_threads())
    return _Shape(*sizes, *flags, *_pointers(shifted, index, shift))


def _call(name: str, shape: _Shape, *tensors: Tensor | None) -> None:
    failed = getattr(load_kernel().library, name)(ctypes.byref(shape), *_pointers(*tensors))
    if failed == _BAD_INDEX:
        raise IndexError("`index` names a channel that the input does not have.")
    if failed:
        raise MemoryError("the selective kernel could not get memory for its scratch space.")


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


KERNEL = Kernel(
    can_run=can_run,
    find_obstacle=find_obstacle,
    describe=lambda: load_kernel().about,
    reroute=reroute,
    reads_allocation=True,  # which costs nothing on the CPU
    norm_relu_reroute=norm_relu_reroute,
    moments=moments,
)
