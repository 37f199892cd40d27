"""Batch norm, ReLU and SelectChannel in one kernel, for blocks that end in a selective conv."""

import torch
from torch import Tensor, nn

from selectconv.core import kernels
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import ObservedMean


def convolve_norm_relu(layer: SelectConvNd, x: Tensor, norm: nn.Module) -> Tensor | None:
    """Compute `layer(relu(norm(x)))` with norm, ReLU and SelectChannel in one kernel.

    Closed slots are skipped. Returns None, and changes nothing, where that kernel cannot run; and
    for a fresh layer, which must match plain modules to the last bit.
    """
    if not (
        isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        and type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)  # a subclass may compute otherwise
        and norm.weight is not None
        and norm.weight.dtype == torch.float32
        and norm.bias is not None
        and layer._is_input(x)
        and x.ndim == layer.weight.ndim
        and layer.find_kernel(x) is kernels.cpu
        and x.numel() > x.shape[1]  # with one value per channel torch's batch norm refuses
        and not (layer.training and isinstance(layer._mean_source, ObservedMean))
        and not has_hooks(norm)
        and not has_hooks(layer)
    ):
        return None
    slots = layer._read_slots()
    if slots.is_fresh or slots.closed == layer.in_channels:  # a conv needs an input
        return None
    return layer._convolve_open(x, slots=slots, norm=norm)


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
