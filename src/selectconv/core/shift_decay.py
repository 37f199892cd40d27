"""Shifts have a weight decay of their own, whatever optimizer trains them.

The decay of the weights would shrink them to nothing. While an optimizer of this process steps, its
shifts stand in groups of their own; between steps the groups are as the user made them, so that
schedulers and checkpoints see nothing of it.
"""

from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from selectconv.core.slots import living_layers

SHIFT_WEIGHT_DECAY = 1e-5  # supplement B.1
KEY = "shift_weight_decay"  # of a parameter group: the decay of its shifts
# By optimizer, while it steps: a group, its parameters, and the groups that stand for its shifts.
_parted: WeakKeyDictionary[Any, list[tuple[Any, list[Tensor], list[Any]]]] = WeakKeyDictionary()


@cache
def watch_optimizers() -> None:
    """Look after the shifts of every optimizer from now on."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_part))
    register_optimizer_step_post_hook(torch.compiler.disable(_join))


def _part(optimizer: Any, *_: Any) -> None:
    learns = {
        id(shift): layer.learns_shift
        for layer in living_layers
        if (shift := layer._parameters.get("shift")) is not None
    }
    _join(optimizer)  # a step that failed half-way did not
    for group in list(optimizer.param_groups):
        params = group["params"]
        shifts = [p for p in params if id(p) in learns]
        if not shifts or "weight_decay" not in group:
            continue
        learned = [p for p in shifts if learns[id(p)]]  # what is not must not change: no group
        decay = group.get(KEY, min(group["weight_decay"] or 0.0, SHIFT_WEIGHT_DECAY))
        if decay == group["weight_decay"] and len(learned) == len(shifts):
            continue
        if optimizer not in _parted:
            _parted[optimizer] = []
            with suppress(AttributeError):  # wrappers that are no whole optimizers
                optimizer.register_state_dict_pre_hook(_join)
        apart = {**group, "params": learned, "weight_decay": decay}
        group["params"] = [p for p in params if id(p) not in learns]
        _parted[optimizer].append((group, params, [apart] if learned else []))
        optimizer.param_groups.extend(_parted[optimizer][-1][-1])


def _join(optimizer: Any, *_: Any) -> None:
    parted = _parted.get(optimizer, [])
    for group, params, aparts in parted:
        group["params"] = params
        kept = [g for g in optimizer.param_groups if all(g is not apart for apart in aparts)]
        optimizer.param_groups[:] = kept
    parted.clear()
