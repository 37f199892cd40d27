"""The optimizer's parameter groups: the paper decays spatial shifts less than everything else."""

from typing import Any

from torch import nn

from selectconv.checks import check_non_negative
from selectconv.core.models import selective_layers


def param_groups(
    model: nn.Module, weight_decay: float | None = None, shift_weight_decay: float = 1e-5
) -> list[dict[str, Any]]:
    """Group a model's trainable parameters for any torch optimizer.

    Args:
        model: any model, selective or plain.
        weight_decay: weight decay of everything but the shifts. None: the optimizer's own.
        shift_weight_decay: weight decay of the shifts of selective layers (supplement B.1).

    Returns:
        One group, and a second one if there are shifts.

    Raises:
        TypeError, ValueError: a weight decay is negative or not finite, or the model has nothing
            to train.

    Example:
        >>> import torch
        >>> [len(group["params"]) for group in param_groups(torch.nn.Linear(2, 3))]
        [2]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    if weight_decay is not None:
        weight_decay = check_non_negative("weight_decay", weight_decay)
    shift_weight_decay = check_non_negative("shift_weight_decay", shift_weight_decay)
    layers = selective_layers(model).values()
    shift_ids = {id(layer.shift) for layer in layers if layer.shift is not None}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("`model` has no parameters that require a gradient.")
    others = [parameter for parameter in trained if id(parameter) not in shift_ids]
    shifts = [parameter for parameter in trained if id(parameter) in shift_ids]
    # A group that says nothing is decayed by the optimizer's own value.
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": others, **decay},
        {"params": shifts, "weight_decay": shift_weight_decay},
    ]
    return [group for group in groups if group["params"]]
