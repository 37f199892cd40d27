"""What an optimizer is given, and what it remembers of slots, cleared when one is re-opened."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from selectconv.checks import check_non_negative, warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.errors import AllocationError
from selectconv.tables import counted

_UNFIT = (
    "that cannot be cleared for a re-opened slot: use an optimizer with state for each element, "
    "which begins at zero (SGD, Adam, AdamW, ...)."
)


SHIFT_WEIGHT_DECAY = 1e-5  # supplement B.1


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


def as_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that were given: none, one or a list, taken out of their wrappers.

    Raises:
        TypeError: one of them is not an optimizer.
    """
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = []
    for one in given if optimizer is not None else ():
        inner = getattr(one, "optimizer", None)  # of Accelerate's and Lightning's wrappers
        optimizers.append(inner if isinstance(inner, torch.optim.Optimizer) else one)
        if not hasattr(optimizers[-1], "param_groups") or not hasattr(optimizers[-1], "state"):
            raise TypeError(
                "`optimizer` must be a torch optimizer or a list of them, got "
                f"{type(one).__name__}."
            )
    return optimizers


def check_owns(
    optimizers: Sequence[torch.optim.Optimizer], layers: Mapping[str, SelectConvNd]
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


def spare_shifts(optimizer: torch.optim.Optimizer, layers: Mapping[str, SelectConvNd]) -> None:
    """Keep shifts that share a group with other parameters from that group's weight decay.

    It would shrink them to nothing. While such an optimizer steps, its shifts stand in a group of
    their own with the paper's decay. Between steps the groups are as the user made them, so that
    schedulers and checkpoints see nothing of it. A group of shifts alone is left as it is, unless
    it is one of several that decay as weights do: then every parameter has a group.

    Where layers do not learn shifts, these stand in no group while it steps: it cannot change them.
    """
    shifts = {id(layer.shift) for layer in layers.values()}
    parted: list[tuple[dict[str, Any], list[Tensor], dict[str, Any]]] = []

    # Hooks that held the optimizer would keep it, and the model, alive: torch gives it to them.
    def part(stepped: Any, *_: Any) -> None:
        join(stepped)  # a step that failed half-way did not; its copies of settings may be old
        for group in find_mixed(stepped.param_groups):
            both, own = group["params"], [p for p in group["params"] if id(p) in shifts]
            group["params"] = [p for p in both if id(p) not in shifts]
            apart = {**group, "params": own, "weight_decay": SHIFT_WEIGHT_DECAY}
            parted.append((group, both, apart))
            if learns():
                stepped.param_groups.append(apart)

    def join(stepped: Any, *_: Any) -> None:
        stepped.param_groups[:] = [
            group
            for group in stepped.param_groups
            if all(group is not apart for *_, apart in parted)
        ]
        for group, both, _apart in parted:
            group["params"] = both
        parted.clear()

    def learns() -> bool:
        return all(layer.learns_shift for layer in layers.values())

    def find_mixed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        mixed, least = [], SHIFT_WEIGHT_DECAY if learns() else -1.0
        for group in groups:
            decay, params = group.get("weight_decay") or 0, group["params"]
            if decay > least and not shifts.isdisjoint(map(id, params)):
                alike = [x["params"] for x in groups if x.get("weight_decay") == decay]
                owned = set(map(id, chain(*alike)))
                is_one_of_many = len(owned & shifts) > len(params) and not owned <= shifts
                if least < 0 or is_one_of_many or not shifts.issuperset(map(id, params)):
                    mixed.append(group)
        return mixed

    if isinstance(optimizer, torch.optim.Optimizer):  # groups may be added later
        optimizer.register_step_pre_hook(part)
        optimizer.register_step_post_hook(join)
    elif find_mixed(optimizer.param_groups):  # it only looks like one
        warn("`optimizer` decays shifts like weights, to nothing: build it from sc.param_groups.")


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
