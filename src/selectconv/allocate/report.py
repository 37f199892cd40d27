"""What a step of an allocator did, or would do, and the log of all steps of a training.

`AllocationReport.to_dict` makes a row of the log, and a run's `allocation.jsonl` holds one row per
line: `{"epoch": 3, "layers": {name: {"closed": [4], "opened": [[slot, source, shift]]}}}`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError, naming
from selectconv.files import read_json_lines
from selectconv.tables import counted, text_table

Log = str | PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class AllocationReport:
    """What a step did, or would do. It is false if nothing changed.

    Attributes:
        epoch: the epoch of a scheduled step; None for one on demand.
        plan: the plan itself, which `ChannelAllocator.apply` carries out on a copy of the model.
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
        when = "" if self.epoch is None else f"epoch {self.epoch}: "
        if self.is_over:
            return f"{when}no step, since stop_at has passed"
        closed = counted(sum(len(plan.closed) for _, plan in self.plan), "slot")
        opened = sum(len(plan.opened) for _, plan in self.plan)
        where = counted(len(self.plan.layers), "layer")
        unknown = f"; not known before the first batch: {', '.join(self.unknown)}"
        more = (unknown if self.unknown else "") + (f"; {self.cost}" if self.cost else "")
        return f"{when}{closed} de-allocated, {opened:,} re-allocated in {where}{more}"

    __repr__ = __str__  # for notebooks


class GammaRow(NamedTuple):
    """What a step would close at one gamma.

    Attributes:
        gamma: the gamma.
        closed: the number of slots that the step would close.
        layers: the number of layers that would close any.
        open: the number of slots that would stay open, in all layers.
        macs: multiply-adds of the model without the closed slots, before any is re-opened. None:
            there is no example input.
        params: the same for parameters.
    """

    gamma: float
    closed: int
    layers: int
    open: int
    macs: int | None = None
    params: int | None = None


class GammaTable(tuple[GammaRow, ...]):
    """The rows of `preview(gammas=...)`, which print as a table.

    Attributes:
        note: of how many slots, and which layers the rows leave out.
    """

    note: str = ""

    def __str__(self) -> str:
        lines = [
            [f"{gamma:g}", *("-" if number is None else f"{number:,}" for number in counts)]
            for gamma, *counts in self
        ]
        head = ["gamma", "closed", "layers", "open", "multiply-adds", "parameters"]
        return f"{text_table([head, *lines], right=range(6))}\n{self.note}"

    __repr__ = __str__  # for notebooks


def read_log(log: Log) -> list[AllocationReport]:
    """Read what each step did.

    Args:
        log: the path of a jsonl file, or its rows. The unfinished last line of a killed process
            does not count.

    Raises:
        AllocationError: the file cannot be read, or a row is damaged; the message says which.
    """
    if isinstance(log, str | PathLike):
        where, rows = f"{log}, line", read_json_lines(Path(log), error=AllocationError)
    elif isinstance(log, Iterable) and not isinstance(log, Mapping | Tensor):
        where, rows = "row", list(log)
    else:
        raise AllocationError(
            f"`log` must be the path of a jsonl file or its rows, got {type(log).__name__}."
        )
    reports = []
    for number, row in enumerate(rows, start=1):
        with naming(f"{where} {number}"):
            is_row = isinstance(row, Mapping) and {"epoch", "layers"} <= set(row)
            if not is_row or not isinstance(row["epoch"], int | None):
                raise AllocationError(
                    "a row of the log needs `epoch`, an integer or null, and `layers`, "
                    f"got {row!r:.60}."
                )
            reports.append(AllocationReport(row["epoch"], AllocationPlan.from_dict(row["layers"])))
    return reports
