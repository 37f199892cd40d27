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
    shift_ids = {id(layer.shift) for layer in selective_layers(model).values()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("`model` has no parameters that require a gradient.")
    others: dict[str, Any] = {"params": [p for p in trained if id(p) not in shift_ids]}
    if weight_decay is not None:  # otherwise the optimizer's own value acts
        others["weight_decay"] = check_non_negative("weight_decay", weight_decay)
    shifts = {
        "params": [p for p in trained if id(p) in shift_ids],
        "weight_decay": check_non_negative("shift_weight_decay", shift_weight_decay),
    }
    return [group for group in (others, shifts) if group["params"]]
