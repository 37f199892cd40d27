"""Plans: what is decided before it is done, for each layer and for a whole model.

Deciding and doing are apart: a plan can be logged as JSON, sent to other processes, and applied to
any copy of the model.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from selectconv.errors import AllocationError, BadType, BadValue

_NO_INTEGERS = (torch.bool, torch.complex64, torch.complex128)


def as_slots(slots: Tensor | Iterable[int], inputs: int) -> Tensor:
    """Return slots as an int64 tensor on the CPU.

    Raises:
        AllocationError: the layer, of `inputs` slots, does not have one of them.
        TypeError: a slot is not an integer.
    """
    is_bare = isinstance(slots, Iterable) and not hasattr(slots, "__getitem__")  # sets
    try:
        given = torch.as_tensor(list(slots) if is_bare else slots)
    except (RuntimeError, TypeError, ValueError):
        raise BadType(f"`slots` must be integers, got {slots!r:.60}.") from None
    if given.numel() and (given.dtype.is_floating_point or given.dtype in _NO_INTEGERS):
        raise BadType(f"`slots` must be integers, got {given.dtype}.")
    given = given.flatten().to("cpu", torch.int64)
    if outside := given[(given < 0) | (given >= inputs)].tolist():
        raise AllocationError(f"`slots` names {outside[:5]}; the layer has 0 to {inputs - 1}.")
    return given


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What to do to one layer: close slots, then re-open slots. All tensors are on the CPU.

    Attributes:
        closed: (A,) int64, the slots to close; of a layer that is not selective, the channels of
            its input.
        opened: (B,) int64, the closed slots to re-open.
        source: (B,) int64, the channels that they will read.
        shift: (B, axes), their shifts in pixels. None: no shift.
        weight_seed: the seed from which R^random draws their weights. None: zeros.
        filters: (F,) int64, the channels of its output to make zero.
    """

    closed: Tensor = field(default_factory=_empty)
    opened: Tensor = field(default_factory=_empty)
    source: Tensor = field(default_factory=_empty)
    shift: Tensor | None = None
    weight_seed: int | None = None
    filters: Tensor = field(default_factory=_empty)

    def __bool__(self) -> bool:
        return len(self.closed) + len(self.opened) + len(self.filters) > 0

    def check(self, gate: Tensor, axes: int, *, can_open: bool) -> None:
        """Check that the plan fits a layer and its present allocation.

        Args:
            gate: (I,) bool on the CPU, the layer's open slots.
            axes: spatial axes of the layer.
            can_open: whether the layer re-allocates.

        Raises:
            AllocationError: it names slots or channels that do not exist, or re-opens open ones.
        """
        for what in ("closed", "opened", "source"):
            slots = getattr(self, what)
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(gate):
                outside = slots[(slots < 0) | (slots >= len(gate))].tolist()
                raise AllocationError(
                    f"`{what}` names {outside[:5]}; the layer has 0 to {len(gate) - 1}."
                )
        count, seed = len(self.opened), self.weight_seed or 0
        shift = torch.zeros(count, axes, device="cpu") if self.shift is None else self.shift
        still_open = self.opened[gate.index_fill(0, self.closed, False)[self.opened]].tolist()
        problems = {
            "the layer has reallocate=False: its slots cannot be re-opened.": (
                count and not can_open
            ),
            f"each slot to re-open needs one source channel, got {count} slots and "
            f"{len(self.source)} channels.": count != len(self.source),
            f"`opened` names a slot twice: {self.opened.tolist()}.": (
                count != len(self.opened.unique())
            ),
            f"slots {still_open[:5]} are open already.": still_open,
            f"shifts must have shape ({count}, {axes}), got {tuple(shift.shape)}.": (
                tuple(shift.shape) != (count, axes)
            ),
            "shifts must be finite, got NaN or infinite ones.": not bool(shift.isfinite().all()),
            f"`weight_seed` must be in [0, 2^63), got {seed}.": not 0 <= seed < 1 << 63,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise AllocationError(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return lists and numbers only: `closed` slots, `opened` as [slot, source, shift]."""
        shift = [None] * len(self.opened) if self.shift is None else self.shift.tolist()
        opened = zip(self.opened.tolist(), self.source.tolist(), shift, strict=True)
        plan: dict[str, Any] = {
            "closed": self.closed.tolist(),
            "opened": [list(row) for row in opened],
        }
        if self.weight_seed is not None:
            plan["weight_seed"] = self.weight_seed
        if len(self.filters):
            plan["filters"] = self.filters.tolist()
        return plan

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> "LayerPlan":
        """Read what `to_dict` wrote."""
        try:
            # operator.index refuses what int would round or read: 2.7, "3", infinity.
            rows = [(as_int(slot), as_int(source), shift) for slot, source, shift in plan["opened"]]
            closed = [as_int(slot) for slot in plan["closed"]]
            filters = [as_int(channel) for channel in plan.get("filters", [])]
            if (
                min([*closed, *filters, *(number for row in rows for number in row[:2])], default=0)
                < 0
            ):
                raise BadValue("slots and channels count from 0")
            shifts = [shift for *_, shift in rows]
            has_shift = any(shift is not None for shift in shifts)  # torch refuses None among them
            seed = plan.get("weight_seed")
            return cls(
                closed=torch.tensor(closed, dtype=torch.int64, device="cpu"),
                opened=torch.tensor([slot for slot, _, _ in rows], dtype=torch.int64, device="cpu"),
                source=torch.tensor(
                    [source for _, source, _ in rows], dtype=torch.int64, device="cpu"
                ),
                shift=torch.tensor(shifts, dtype=torch.float32, device="cpu")
                if has_shift
                else None,
                weight_seed=None if seed is None else as_int(seed),
                filters=torch.tensor(filters, dtype=torch.int64, device="cpu"),
            )
        except (KeyError, RuntimeError, TypeError, ValueError) as error:  # Runtime: 2**70
            raise AllocationError(
                "A layer's plan needs `closed` (slots) and `opened` (rows of slot, source and shift"
                f" or null); reading it failed: {error}."
            ) from error


@dataclass(frozen=True, eq=False)
class AllocationPlan:
    """What to do to a model: one `LayerPlan` per layer that changes, by the layer's name.

    Example:
        >>> plan = AllocationPlan.from_dict({"conv": {"closed": [2], "opened": [[2, 0, None]]}})
        >>> plan.to_dict()
        {'conv': {'closed': [2], 'opened': [[2, 0, None]]}}
    """

    layers: dict[str, LayerPlan] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.layers.values())

    def __iter__(self) -> Iterator[tuple[str, LayerPlan]]:
        return iter(self.layers.items())

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {name: plan.to_dict() for name, plan in self}

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> "AllocationPlan":
        """Read what `to_dict` wrote.

        Raises:
            AllocationError: the dict is not a plan.
        """
        if not isinstance(plan, Mapping):
            raise AllocationError(f"a plan must be a dict by layer, got {type(plan).__name__}.")
        return cls({name: LayerPlan.from_dict(layer) for name, layer in plan.items()})
