"""SelectChannel on the CPU in C, alone or fused with the batch norm and ReLU before it.

Autograd sees one operation with a hand-written backward: no scatter, no atomics, deterministic.
"""

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core.kernels.build import load_kernel
from selectconv.core.kernels.kernel import Grads, Kernel, Operation, differentiable
from selectconv.core.shift import memory_format
from selectconv.core.shift import reroute as reroute_by_definition

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


def norm_relu_reroute(
    norm: _BatchNorm, x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None
) -> Tensor:
    """Compute `reroute(relu(norm(x)), ...)` in one pass over `x`; updates the norm's statistics."""
    batch_eps = None
    if norm.training or norm.running_mean is None or norm.running_var is None:
        mean, var = moments(x)
        _update_running(norm, mean, var, x.numel() // x.shape[1])
        batch_eps = norm.eps
    else:
        mean, var = norm.running_mean, norm.running_var
    affine = (norm.weight, norm.bias, mean, torch.rsqrt(var + norm.eps))
    return _run(batch_eps, x, index, shift, shifted, *affine)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance (not the unbiased one) of each channel of `x` (N, C, ...)."""
    mean, var = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    _call("channel_moments", _describe(x), x, mean, var)
    return mean, var


def _run(
    batch_eps: float | None,
    x: Tensor,
    index: Tensor,
    shift: Tensor | None,
    shifted: Tensor | None,
    *norm: Tensor,
) -> Tensor:
    """Select, with derivatives where they may be wanted: they take longer to prepare.

    Args:
        batch_eps: batch norm's eps, if its statistics are the batch's own; otherwise None.
        x: (N, C, ...).
        index: as for `reroute`.
        shift: as for `reroute`.
        shifted: as for `reroute`.
        norm: of the batch norm before: weight, bias, mean, 1 / standard deviation. Nothing: there
            is neither batch norm nor ReLU.
    """
    if shift is not None and not (shift.dtype == torch.float32 and shift.is_contiguous()):
        shift = shift.to(torch.float32).contiguous()
    shifted = None if shifted is None else shifted.contiguous()
    index = index.contiguous()
    if not torch.is_grad_enabled():
        return _select(x, index, shift, shifted, *norm)
    operation = Operation(_select, partial(_differentiate, batch_eps), partial(_define, batch_eps))
    return differentiable(operation, x, index, shift, shifted, *norm)


reroute = partial(_run, None)  # computes `core.shift.reroute`


def _select(
    x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None, *norm: Tensor
) -> Tensor:
    size = (x.shape[0], index.numel(), *x.shape[2:])
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    scale, offset = _affine(*norm) if norm else (None, None)
    _call("select_forward", _describe(x, index, shift, shifted), x, scale, offset, out)
    return out


def _affine(
    bn_weight: Tensor, bn_bias: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset, (C,) each, that batch norm amounts to."""
    scale = bn_weight * inverse
    return scale, torch.addcmul(bn_bias, mean, scale, value=-1)


def _differentiate(
    batch_eps: float | None,
    grad: Tensor,
    needed: Sequence[bool],
    x: Tensor,
    index: Tensor,
    shift: Tensor | None,
    shifted: Tensor | None,
    *norm: Tensor,
) -> Grads:
    grad = grad.contiguous(memory_format=memory_format(x))
    grad_x = torch.empty_like(x)
    grad_shift = None if shift is None or not needed[2] else torch.empty_like(shift)
    shape = _describe(x, index, shift, shifted)
    if not norm:
        _call("select_backward", shape, x, None, None, None, grad, grad_x, None, grad_shift)
        return grad_x, None, grad_shift
    scale, offset = _affine(*norm)
    *_, mean, inverse = norm
    sums = x.new_empty(x.shape[1], 2)
    _call("select_backward", shape, x, scale, offset, mean, grad, grad_x, sums, grad_shift)
    grad_bias, grad_weight = sums[:, 0], sums[:, 1] * inverse
    lift = tilt = torch.zeros_like(scale)
    if batch_eps is not None:  # the batch's own statistics depend on x as well
        count = x.numel() // x.shape[1]
        lift, tilt = grad_bias / count, grad_weight * inverse / count
    _call("norm_backward", shape, x, scale, mean, lift, tilt, grad_x)
    return grad_x, None, grad_shift, None, grad_weight, grad_bias


def _define(
    batch_eps: float | None,
    x: Tensor,
    index: Tensor,
    shift: Tensor | None,
    shifted: Tensor | None,
    *norm: Tensor,
) -> Tensor:
    if norm:
        bn_weight, bn_bias, mean, inverse = norm
        if batch_eps is None:
            x = F.batch_norm(x, mean, inverse.pow(-2), bn_weight, bn_bias, eps=0.0)
        else:
            x = F.batch_norm(x, None, None, bn_weight, bn_bias, training=True, eps=batch_eps)
        x = F.relu(x)
    return reroute_by_definition(x, index, shift, shifted)


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
