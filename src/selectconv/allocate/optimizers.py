"""What an optimizer is given, and what it remembers of slots, cleared when one is re-opened."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from selectconv.checks import check_non_negative
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.shift_decay import KEY, SHIFT_WEIGHT_DECAY
from selectconv.errors import AllocationError, BadType, BadValue
from selectconv.tables import counted

_UNFIT = (
    "that cannot be cleared for a re-opened slot: use an optimizer with state for each element, "
    "which begins at zero (SGD, Adam, AdamW, ...)."
)


def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    shift_weight_decay: float = SHIFT_WEIGHT_DECAY,
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
        raise BadType(f"`model` must be an nn.Module, got {type(model).__name__}.")
    shift_ids = {id(layer.shift) for layer in selective_layers(model).values()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise BadValue("`model` has no parameters that require a gradient.")
    others: dict[str, Any] = {"params": [p for p in trained if id(p) not in shift_ids]}
    if weight_decay is not None:  # otherwise the optimizer's own value acts
        others["weight_decay"] = check_non_negative("weight_decay", weight_decay)
    decay = check_non_negative(KEY, shift_weight_decay)
    shifts = {
        "params": [p for p in trained if id(p) in shift_ids],
        "weight_decay": decay,
        KEY: decay,  # schedules may change the other
    }
    return [group for group in (others, shifts) if group["params"]]


def as_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that were given: none, one or a list, taken out of their wrappers.

    Raises:
        TypeError: one of them is not an optimizer.
    """
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers: list[torch.optim.Optimizer] = []
    for one in given if optimizer is not None else ():
        # Of Accelerate, Lightning, timm's Lookahead, SAM: the state is that of the inner one.
        inner = [
            x for x in getattr(one, "__dict__", {}).values() if isinstance(x, torch.optim.Optimizer)
        ]
        if not inner and not isinstance(one, torch.optim.Optimizer):
            raise BadType(
                "`optimizer` must be a torch optimizer or a list of them, got "
                f"{type(one).__name__}."
            )
        optimizers += as_optimizers(inner) if inner else [one]
    return optimizers


def check_owns(
    optimizers: Sequence[torch.optim.Optimizer], layers: Mapping[str, nn.Module]
) -> None:
    """Check that optimizers, if there are any, train what the layers learn.

    Raises:
        AllocationError: they do not own all of their weights and shifts.
    """
    owned = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [
        f"{name}.{kind}"
        for name, layer in layers.items()
        for kind in ("weight", "shift")
        if (parameter := layer._parameters.get(kind)) is not None  # and not recomputed
        and parameter.requires_grad
        and id(parameter) not in owned
    ]
    if optimizers and missing:
        raise AllocationError(
            f"`optimizer` does not own {counted(len(missing), 'parameter')} of the model's "
            f"selective layers, the first {missing[0]!r}: build it after sc.convert and "
            "load_state_dict(assign=True), from sc.param_groups(model); or freeze the layers."
        )


def decays(optimizers: Iterable[torch.optim.Optimizer], layers: Mapping[str, SelectConvNd]) -> bool:
    """Return whether optimizers decay the weights of any layer, as far as their groups tell."""
    weights = {id(layer.weight) for layer in layers.values()}
    return any(
        group.get("weight_decay", None) != 0
        for one in optimizers
        for group in one.param_groups
        if any(id(parameter) in weights for parameter in group["params"])
    )


def state_of(optimizers: Iterable[torch.optim.Optimizer], parameter: Tensor) -> Iterator[Tensor]:
    """Yield a parameter's gradient, and what optimizers remember of each of its elements.

    Raises:
        AllocationError: an optimizer keeps state that cannot be cleared for a slot: of another
            shape, of all parameters together, or a step size, without which nothing would move.
    """
    if parameter.grad is not None:
        yield parameter.grad
    for optimizer in optimizers:
        refused = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Rprop):
            raise AllocationError(f"{refused} keeps state {_UNFIT}")
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                yield value
            elif any(isinstance(x, Tensor) and x.numel() > 1 for x in tree_leaves(value)):
                raise AllocationError(f"{refused} keeps its state {key!r} in a shape {_UNFIT}")
