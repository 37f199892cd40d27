"""How forward passes compute: a summary of the allocation, and which path is the cheapest.

path        when                                                    convolves
every slot  the allocation's values cannot be read, or the host     all slots, weights of
            would wait for them: compiled models, torch.func, GPUs  closed ones zero
open        a kernel runs and slots are rerouted or many closed,    the open slots alone
            unless copying weights costs more
whole       otherwise                                               all slots, zeros for closed
                                                                    ones in weight or input

The result is the same.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selectconv.core import kernels
from selectconv.core.kernels import Kernel, is_watched
from selectconv.core.kernels.kernel import Operation, Reroute, differentiable
from selectconv.core.mean_source import ObservedMean
from selectconv.core.shift import is_near, mask_channels, reroute
from selectconv.core.slots import SlottedConv, mask_weight

# What copying one number costs, in multiply-adds of a conv, forward and backward.
_COPY_COST = 100


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """What forward passes need to know of gate, index and shifted, computed when these change.

    Attributes:
        addresses: where the buffers' memory is.
        arrays: that memory.
        content: the buffers' bytes.
        closed: how many slots are closed.
        rerouted: how many read anything but their own channel as it is.
        num_shifted: how many read with a shift.
        kept: the slots to compute: the open ones; None: all of them, since none is closed or since
            the conv has groups.
        index, shifted: what these slots read, on the CPU, for its kernel.
    """

    addresses: list[int]
    arrays: list[npt.NDArray[Any]]
    content: list[bytes]
    closed: int
    rerouted: int
    num_shifted: int
    kept: Tensor | None
    index: Tensor
    shifted: Tensor


_summaries: WeakKeyDictionary[SlottedConv, SlotSummary] = WeakKeyDictionary()


def summarize(layer: SlottedConv) -> SlotSummary:
    """Summarize a layer's allocation; the last summary holds while the buffers hold its bytes.

    The layer is on the CPU. This is called in every forward, so it works with numpy, not torch.
    """
    last = _summaries.get(layer)
    tensors = [cast(Tensor, layer._buffers[name]) for name in ("gate", "shifted", "index")]
    addresses = [tensor.data_ptr() for tensor in tensors]
    if last is not None and last.addresses == addresses:
        arrays = last.arrays  # to make them anew takes longer
    else:
        arrays = [tensor.numpy() for tensor in tensors]
    # Contents are compared, since a write in place is not always counted by torch.
    content = [array.tobytes() for array in arrays]
    if last is None or last.content != content or last.arrays is not arrays:
        last = _summaries[layer] = _summarize(addresses, arrays, content, layer.groups)
    return last


def _summarize(
    addresses: list[int], arrays: list[npt.NDArray[Any]], content: list[bytes], groups: int
) -> SlotSummary:
    gate, shifted, index = arrays
    shifted = shifted & gate
    rerouted = shifted | (gate & (index != np.arange(len(index))))
    kept = np.flatnonzero(gate) if groups == 1 else np.arange(len(index))
    with torch.inference_mode(False):  # autograd refuses inference tensors
        return SlotSummary(
            addresses=addresses,
            arrays=arrays,
            content=content,
            closed=int(np.count_nonzero(~gate)),
            rerouted=int(np.count_nonzero(rerouted)),
            num_shifted=int(np.count_nonzero(shifted)),
            kept=None if len(kept) == len(index) else torch.from_numpy(kept),
            index=torch.from_numpy(index[kept]),
            shifted=torch.from_numpy(shifted[kept]),
        )


def is_input(layer: SlottedConv, x: Tensor) -> bool:
    """Return whether `x` is (N, I, ...) or unbatched (I, ...)."""
    axes = layer.weight.ndim - 2
    return x.ndim in (axes + 1, axes + 2) and x.shape[-axes - 1] == layer.in_channels


def prepare(layer: SlottedConv, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what to convolve, and with which weight, on one of the paths; `x` is (N, I, ...)."""
    kernel = _find_kernel(layer, x)
    # A kernel serves only what can be read.
    if not (is_near(layer.gate) if kernel is None else kernel.reads_allocation):
        weight = mask_weight(layer)
        return reroute_slots(layer, x, kernel), _tie_shift(layer, weight)
    slots = summarize(layer)
    if kernel is not None and _leaves_out_closed(layer, x, slots):
        return _gather_open(layer, x, slots, kernel.reroute)
    weight, is_small = layer.weight, x.numel() < layer.weight.numel()
    if slots.rerouted:
        x = reroute_slots(layer, x, kernel)
    if slots.closed and is_small:
        x = mask_channels(x, layer.gate)
    elif slots.closed:
        weight = mask_weight(layer)
    return x, _tie_shift(layer, weight, is_read=slots.num_shifted > 0)


def convolve_norm_relu(layer: SlottedConv, x: Tensor, norm: nn.Module) -> Tensor | None:
    """Compute `layer(relu(norm(x)))` with norm, ReLU and SelectChannel in one kernel.

    Closed slots are skipped. Returns None, and changes nothing, where that kernel cannot run; and
    for a fresh layer, which must match plain modules to the last bit.
    """
    if (
        not isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d))  # torch 2.9 cannot compile A | B
        or type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d)  # a subclass may compute otherwise
        or norm.bias is None
        or norm.weight.dtype != torch.float32
        or x.ndim != layer.weight.ndim
        or not is_input(layer, x)
        or x.numel() <= x.shape[1]  # with one value per channel torch's batch norm refuses
        or (layer.training and isinstance(layer.mean_source, ObservedMean))
        or has_hooks(norm)
        or has_hooks(layer)
    ):
        return None
    kernel = _find_kernel(layer, x)
    if kernel is None or kernel.norm_relu_reroute is None:
        return None
    slots = summarize(layer)
    if not (slots.closed or slots.rerouted) or slots.closed == layer.in_channels:
        return None  # fresh, or without any input
    run = partial(kernel.norm_relu_reroute, norm)
    return layer._conv_forward(*_gather_open(layer, x, slots, run), layer.bias)


def _find_kernel(layer: SlottedConv, x: Tensor) -> Kernel | None:
    """Return the kernel that serves an input, or None, also if the layer is on another device.

    Without a kernel torch says what is wrong with the devices; a kernel would read anything.
    """
    gate, here = cast(Tensor, layer._buffers["gate"]), x.device  # layer.gate takes long to find
    is_here = layer.weight.device == here and gate.device == here
    return kernels.find_kernel(x) if is_here else None


def reroute_slots(layer: SlottedConv, x: Tensor, kernel: Kernel | None) -> Tensor:
    """SelectChannel without the gate: `x` (N, I, ...) as every slot reads it."""
    run = reroute if kernel is None else kernel.reroute
    shifted = None if layer.shift is None else layer.shifted & layer.gate
    return run(x, layer.index, _shift_of(layer), shifted)


def _shift_of(layer: SlottedConv) -> Tensor | None:
    """Return the shifts, with a gradient if the layer learns them."""
    shift = layer.shift
    return shift if layer.learns_shift or shift is None else shift.detach()


def _gather_open(
    layer: SlottedConv, x: Tensor, slots: SlotSummary, run: Reroute
) -> tuple[Tensor, Tensor]:
    """Leave closed slots out of input and weight."""
    weight: Tensor = layer.weight
    shift = _shift_of(layer)
    if slots.kept is not None:
        weight = weight.index_select(1, slots.kept)
        shift = None if shift is None else shift.index_select(0, slots.kept)
    elif slots.closed:  # a conv cannot have groups of different sizes
        weight = mask_weight(layer)
    selected = run(x, slots.index, shift, None if shift is None else slots.shifted)
    return selected, _tie_shift(layer, weight)


def _leaves_out_closed(layer: SlottedConv, x: Tensor, slots: SlotSummary) -> bool:
    """Return whether a kernel should prepare the open slots alone."""
    weight = layer.weight
    # Copying the open channels must cost less than convolving the closed ones.
    num_open = layer.in_channels - slots.closed
    multiplies = weight.numel() // layer.in_channels * slots.closed
    gathers = layer.groups == 1 and num_open > 0 and multiplies > _COPY_COST * num_open
    # Copying columns of a channels-last weight takes longer than convolving a few pixels.
    if x.numel() < weight.numel() and not (gathers and weight.is_contiguous()):
        return False
    return gathers or slots.rerouted > 0


def _tie_shift(layer: SlottedConv, weight: Tensor, *, is_read: bool = True) -> Tensor:
    """Tie the shift to the output where it is not read or not learned; the weight's values stay.

    In training every parameter gets a gradient (here: zeros), or DDP would wait for it.
    """
    shift = layer.shift
    if not torch.is_grad_enabled() or shift is None or (is_read and layer.learns_shift):
        return weight
    return _copy_tied(weight, shift) if is_watched() else differentiable(_TIE, weight, shift)


def _copy_tied(weight: Tensor, shift: Tensor) -> Tensor:
    never = torch.zeros((), dtype=torch.bool, device=weight.device)
    return torch.where(never, shift.sum(), weight)


# Without a copy of the weight.
_TIE = Operation(
    run=lambda weight, shift: weight.view_as(weight),
    differentiate=lambda grad, needed, weight, shift: (grad, torch.zeros_like(shift)),
    define=_copy_tied,
)


def has_hooks(module: nn.Module) -> bool:
    """Return whether someone watches or changes what goes in or out of a module."""
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
