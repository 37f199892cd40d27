"""An optimizer's state of single slots, which is cleared when a slot is re-opened."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from selectconv.core.layer import SelectConvNd
from selectconv.errors import AllocationError
from selectconv.tables import counted

_UNFIT = (
    "that cannot be cleared for a re-opened slot: use an optimizer with state for each element, "
    "which begins at zero (SGD, Adam, AdamW, ...)."
)


def check_owns(optimizer: torch.optim.Optimizer, layers: Mapping[str, SelectConvNd]) -> None:
    """Check that an optimizer trains what the layers learn.

    Raises:
        TypeError: it is not an optimizer.
        AllocationError: it does not own all of their weights and shifts.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise TypeError(f"`optimizer` must be a torch optimizer, got {type(optimizer).__name__}.")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        f"{name}.{kind}"
        for name, layer in layers.items()
        for kind, parameter in (("weight", layer.weight), ("shift", layer.shift))
        if parameter is not None and parameter.requires_grad and id(parameter) not in owned
    ]
    if missing:
        raise AllocationError(
            f"`optimizer` does not own {counted(len(missing), 'parameter')} of the model's "
            f"selective layers, the first {missing[0]!r}: build it after sc.convert, from "
            "sc.param_groups(model)."
        )


def decays(optimizer: torch.optim.Optimizer, layers: Mapping[str, SelectConvNd]) -> bool:
    """Return whether an optimizer decays the weights of any layer, as far as its groups tell."""
    weights = {id(layer.weight) for layer in layers.values()}
    return any(
        group.get("weight_decay", None) != 0
        for group in optimizer.param_groups
        if any(id(parameter) in weights for parameter in group["params"])
    )


def state_of_slots(
    optimizer: torch.optim.Optimizer | None, layer: SelectConvNd
) -> Iterator[Tensor]:
    """Yield what holds something of each slot: per-element state and pending gradients.

    Raises:
        AllocationError: the optimizer keeps state that cannot be cleared for a slot: of another
            shape, of all parameters together, or a step size, without which nothing would move.
    """
    refused = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Rprop):
        raise AllocationError(f"{refused} keeps state {_UNFIT}")
    for parameter in (layer.weight, layer.shift):
        if parameter is None:
            continue
        if parameter.grad is not None:
            yield parameter.grad
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                yield value
            elif any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
                raise AllocationError(f"{refused} keeps its state {key!r} in a shape {_UNFIT}")
