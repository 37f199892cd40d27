"""What an allocator is told, checked once, and what its steps change besides the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import index as as_int
from typing import Any, Self

import torch
from torch import Tensor

from selectconv.checks import (
    check_choice,
    check_count,
    check_fraction,
    check_gamma,
    check_share,
    warn,
)
from selectconv.core.allocation import ReallocRule
from selectconv.core.layer import DAMAGES, SelectConvNd
from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError, BadValue

MODES = ("select", "zero", "random", "dealloc", "shift", "none")
_RULES: dict[str, dict[str, Any]] = {  # how modes that re-open slots differ from the paper's rule
    "select": {},
    "zero": {"use_shift": False},
    "random": {"use_shift": False, "init": "random"},
}
STATE_VERSION = 1

_NEVER = -(1 << 40)  # an epoch long before any
_AUTO_GRACE = 0.1  # with gamma="auto", the part of a training in which a re-opened slot is safe


@dataclass(frozen=True)
class Settings:
    """The settings of a `ChannelAllocator`, which says what they mean."""

    total_epochs: int
    gamma: float | str = 1e-3
    top_k: int = 3
    max_copies: int | None = 32
    stop_at: float = 0.5
    grace: int = 0
    mode: str = "select"
    damage: str = "auto"
    target_macs: float | None = None
    target_params: float | None = None
    granularity: str = "slot"
    shifts: str = "learned"

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "mode": check_choice("mode", self.mode, MODES),
            "damage": check_choice("damage", self.damage, DAMAGES),
            "granularity": check_choice("granularity", self.granularity, ("slot", "filter")),
            "total_epochs": check_count("total_epochs", self.total_epochs, 1),
            "gamma": check_gamma("gamma", self.gamma),
            "top_k": self.rule.top_k,
            "max_copies": self.rule.max_copies,
            "stop_at": check_fraction("stop_at", self.stop_at),
            "grace": check_count("grace", self.grace, 0),
            "shifts": check_choice("shifts", self.shifts, ("learned", "whole")),
        }
        if self.granularity == "filter" and self.mode != "dealloc":
            raise BadValue(
                f"`granularity` 'filter' goes with `mode` 'dealloc' only, got {self.mode!r}."
            )
        if self.shifts == "whole" and self.mode != "select":
            raise BadValue(f"`shifts` 'whole' goes with `mode` 'select' only, got {self.mode!r}.")
        if self.target is not None:
            name, value = self.target
            plain[name] = value
            if not self.closes or plain["stop_at"] == 0 or plain["gamma"] == "auto":
                raise BadValue(
                    f"`{name}` needs a `mode` that closes slots, a `stop_at` above 0 and a number "
                    f"as `gamma`; got {self.mode!r}, {self.stop_at!r} and {self.gamma!r}."
                )
        elif plain["gamma"] == "auto":
            plain["grace"] = max(plain["grace"], math.ceil(_AUTO_GRACE * plain["total_epochs"]))
        vars(self).update(plain)  # frozen

    @property
    def closes(self) -> bool:
        """Whether steps close slots."""
        return self.mode not in ("shift", "none")

    @property
    def reopens(self) -> bool:
        """Whether steps re-open slots."""
        return self.mode in _RULES

    @property
    def rule(self) -> ReallocRule:
        """How closed slots are re-opened."""
        own = _RULES.get(self.mode, {})
        return ReallocRule(self.top_k, self.max_copies, **own, is_whole=self.shifts == "whole")

    @property
    def num_steps(self) -> int:
        """The number of epochs in which steps act."""
        return math.ceil(self.stop_at * self.total_epochs)

    @property
    def target(self) -> tuple[str, float] | None:
        """Name and value of the target, or None."""
        return check_targets(self.target_macs, self.target_params)


def check_targets(
    target_macs: float | None, target_params: float | None
) -> tuple[str, float] | None:
    """Check the two targets, of which at most one is given; return that one's name and value.

    Raises:
        TypeError, ValueError: both, or one that is not a number above 0 and at most 1.
    """
    if target_macs is not None and target_params is not None:
        raise BadValue(
            f"`target_macs` {target_macs!r} and `target_params` {target_params!r} cannot be "
            "combined: give one of them."
        )
    for name, value in (("target_macs", target_macs), ("target_params", target_params)):
        if value is not None:
            return name, check_share(name, value)
    return None


@dataclass(frozen=True, eq=False)
class AllocatorState:
    """All that steps change besides the model. Nothing is written into it: a step makes a new one.

    Attributes:
        last_epoch: the epoch of the last step; -1 before the first.
        generator: the state of the allocator's random numbers.
        opened_at: by layer, the epoch in which each slot was last re-opened, (I,) int64.
    """

    last_epoch: int
    generator: Tensor
    opened_at: dict[str, Tensor]

    @classmethod
    def fresh(cls, layers: Mapping[str, SelectConvNd], seed: int) -> Self:
        """Return the state before the first step."""
        never = {
            name: torch.full((layer.in_channels,), _NEVER, device="cpu")
            for name, layer in layers.items()
        }
        return cls(-1, torch.Generator().manual_seed(seed).get_state(), never)

    def make_generator(self) -> torch.Generator:
        """Return a generator that continues the allocator's random numbers."""
        generator = torch.Generator()
        generator.set_state(self.generator)
        return generator

    def protected(self, epoch: int, grace: int) -> dict[str, Tensor]:
        """Return, by layer, which slots may not be closed yet, (I,) bool; empty: all may be."""
        if grace == 0:
            return {}
        return {name: epoch - opened <= grace for name, opened in self.opened_at.items()}

    def after(self, plan: AllocationPlan, epoch: int) -> Self:
        """Return the state after a plan was carried out in an epoch."""
        opened_at = {
            name: self.opened_at[name].index_fill(0, layer_plan.opened, epoch)
            for name, layer_plan in plan
            if len(layer_plan.opened)
        }
        return replace(self, opened_at={**self.opened_at, **opened_at})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], settings: Settings, like: Self) -> Self:
        """Read an allocator's `state_dict`; warn of settings that are others than these.

        Args:
            state: what to read.
            settings: those of the allocator that reads it.
            like: a state of the same architecture.

        Raises:
            AllocationError: it is of another version or architecture, or damaged.
        """
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            raise AllocationError(
                f"`state` must be an allocator's of version {STATE_VERSION}, got {state!r:.60}."
            )
        try:
            # To the CPU: torch.load may have been told to map everything to another device.
            read = cls(
                as_int(state["last_epoch"]),
                torch.as_tensor(state["generator"], device="cpu").clone(),
                {
                    name: torch.as_tensor(epochs, dtype=torch.int64, device="cpu").clone()
                    for name, epochs in state["opened_at"].items()
                },
            )
            read.make_generator()
            changed = [
                f"{name} {state['settings'][name]!r}, here {value!r}"
                for name, value in asdict(settings).items()
                if state["settings"].get(name, value) != value
            ]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise AllocationError(f"`state` is damaged; reading it failed: {error!r}.") from error
        its, own = (
            {(name, epochs.numel()) for name, epochs in one.opened_at.items()}
            for one in (read, like)
        )
        if its != own:
            raise AllocationError(
                "`state` is from another architecture: layers and slots differ at "
                f"{sorted(its ^ own)[:4]}."
            )
        if changed:
            warn(
                f"`state` is from an allocator with other settings: {'; '.join(changed)}. This "
                "allocator keeps its own."
            )
        return read
