"""An allocator's `state_dict`, read back: checked as a whole before anything is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.errors import AllocationError

STATE_VERSION = 1


@dataclass(frozen=True)
class AllocatorState:
    """What a state says.

    Attributes:
        last_epoch: of the last step.
        generator: of the allocator's random numbers.
        opened_at: by layer, the epoch in which each slot was last re-opened.
        settings: of the allocator that wrote it; empty in a state of version 0.1.
    """

    last_epoch: int
    generator: Tensor
    opened_at: dict[str, Tensor]
    settings: dict[str, Any]


def read_state(
    state: Mapping[str, Any], layers: Mapping[str, SelectConvNd], *, has_budget: bool
) -> AllocatorState:
    """Read a state for a model with these selective layers.

    Raises:
        AllocationError: it is of another version or architecture, or damaged.
    """
    keys = {"version", "last_epoch", "generator", "opened_at"} | (
        {"budget"} if has_budget else set()
    )
    if not isinstance(state, Mapping) or set(state) - {"settings"} != keys:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise AllocationError(f"`state` must have the keys {sorted(keys)}, got {got}.")
    if state["version"] != STATE_VERSION:
        raise AllocationError(
            f"`state` has version {state['version']!r}; this selectconv reads {STATE_VERSION}."
        )
    try:
        # To the CPU: torch.load may have been told to map everything to another device.
        generator = torch.Generator()
        generator.set_state(torch.as_tensor(state["generator"], device="cpu"))
        opened_at = {
            name: torch.as_tensor(epochs, dtype=torch.int64, device="cpu").clone()
            for name, epochs in state["opened_at"].items()
        }
        read = AllocatorState(
            as_int(state["last_epoch"]),
            generator.get_state(),
            opened_at,
            dict(state.get("settings", {})),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise AllocationError(f"`state` is damaged; reading it failed: {error}.") from error
    sizes = {name: epochs.numel() for name, epochs in opened_at.items()}
    own = {name: layer.in_channels for name, layer in layers.items()}
    if sizes != own:
        different = sorted(set(sizes.items()) ^ set(own.items()))
        raise AllocationError(
            "`state` is from another architecture: layers and slots differ at "
            f"{', '.join(f'{name} ({slots})' for name, slots in different[:4])}."
        )
    return read


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn where the settings of a state are not those of the allocator that loads it."""
    changed = [
        f"{name} {value!r}, here {now.get(name)!r}"
        for name, value in before.items()
        if value != now.get(name)
    ]
    if changed:
        warn(
            f"`state` is from an allocator with other settings: {'; '.join(changed)}. This "
            "allocator keeps its own."
        )
