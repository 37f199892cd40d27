"""What a step of an allocator did, or would do."""

from dataclasses import dataclass
from typing import Any

from selectconv.core.plan import AllocationPlan
from selectconv.tables import counted, html_table


@dataclass(frozen=True)
class AllocationReport:
    """What a step did, or would do. It is false if nothing changed.

    Attributes:
        epoch: the epoch of a scheduled step; None for one on demand.
        plan: the plan itself, which `ChannelAllocator.apply` carries out on a copy of the model.
        smallest_gamma: in a preview, the smallest gamma at which the next step would close a slot
            that contributes anything. None: no slot can be closed, or this is not a preview.
        unknown: in a preview, the layers that it leaves out because they have not seen any input
            yet.
        cost: with a target, the share of the dense model's cost that is left, in words.
        is_over: whether `stop_at` had passed, so that the step did not act.

    Example:
        >>> plan = AllocationPlan.from_dict({"conv": {"closed": [2, 5], "opened": [[2, 0, None]]}})
        >>> report = AllocationReport(epoch=7, plan=plan)
        >>> report.deallocated, report.reallocated
        ({'conv': [2, 5]}, {'conv': [2]})
        >>> print(report)
        epoch 7: 2 slots de-allocated, 1 re-allocated in 1 layer
    """

    epoch: int | None
    plan: AllocationPlan
    smallest_gamma: float | None = None
    unknown: tuple[str, ...] = ()
    cost: str = ""
    is_over: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return a row of a log: `json` can write it, and `ChannelAllocator.replay` can read it."""
        return {"epoch": self.epoch, "layers": self.plan.to_dict()}

    @property
    def deallocated(self) -> dict[str, list[int]]:
        """The closed slots of each layer that closed any."""
        return {name: plan.closed.tolist() for name, plan in self.plan if len(plan.closed)}

    @property
    def reallocated(self) -> dict[str, list[int]]:
        """The re-opened slots of each layer that re-opened any."""
        return {name: plan.opened.tolist() for name, plan in self.plan if len(plan.opened)}

    def __bool__(self) -> bool:
        return bool(self.plan)

    def __str__(self) -> str:
        closed = sum(map(len, self.deallocated.values()))
        opened = sum(map(len, self.reallocated.values()))
        layers = len(self.plan.layers)
        when = "" if self.epoch is None else f"epoch {self.epoch}: "
        if self.is_over:
            return f"{when}no step, since stop_at has passed"
        acts = "" if self.smallest_gamma is None else f"; acts from gamma {self.smallest_gamma:.2g}"
        slots, where = counted(closed, "slot"), counted(layers, "layer")
        text = f"{when}{slots} de-allocated, {opened:,} re-allocated in {where}{acts}"
        if self.unknown:
            text += f"; not known before the first batch: {', '.join(self.unknown)}"
        return f"{text}; {self.cost}" if self.cost else text

    def _repr_html_(self) -> str:
        lines = [("layer", "de-allocated", "re-allocated")]
        lines += [(name, str(len(one.closed)), str(len(one.opened))) for name, one in self.plan]
        return html_table(lines, right=(1, 2), note=str(self))
