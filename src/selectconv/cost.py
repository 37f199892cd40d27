"""What a model costs: parameters and multiply-adds."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from selectconv.checks import check_count
from selectconv.layer import SelectConvNd


def count_params(model: nn.Module) -> int:
    """Count a model's parameters: batch norm's included, buffers not, shared ones once.

    Example:
        >>> count_params(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)))
        232
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, shape: Sequence[int]) -> int:
    """Count the multiply-adds of a plain model's convs and linears for one input.

    A copy of the model runs on the meta device and in evaluation mode: shapes only, no data, and
    the model is left as it is. Additions of biases, batch norm, activations and pooling count 0.

    Args:
        model: a model without selective layers.
        shape: of one input, without the batch: (C, H, W).

    Raises:
        TypeError, ValueError: a shape that is not of positive integers, or a selective model.

    Example:
        >>> count_macs(nn.Conv2d(3, 8, 3, padding=1), (3, 32, 32)) == 32 * 32 * 8 * 3 * 9
        True
        >>> count_macs(nn.Linear(64, 10), (64,))
        640
    """
    sizes = [check_count("shape", size, 1) for size in shape]
    for name, module in model.named_modules():
        if isinstance(module, SelectConvNd):
            raise ValueError(
                f"`model` must be plain, got a selective layer {name!r}; with nothing closed it "
                "costs what the plain model costs, so count that one."
            )
    dummy = _copy_to_meta(model).eval()
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floating, torch.get_default_dtype())
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        dummy(torch.empty(1, *sizes, dtype=dtype))
    return int(counter.get_total_flops()) // 2  # a multiply-add is two of its operations


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model onto the meta device, without a copy of its data on the way."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)
