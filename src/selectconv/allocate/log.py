"""The log of a training's allocations: one row for each step that changed something.

`AllocationReport.to_dict` makes a row, and a run's `allocation.jsonl` holds one row per line:
`{"epoch": 3, "layers": {name: {"closed": [4], "opened": [[slot, source, shift]]}}}`.
"""

from collections.abc import Iterable, Mapping
from operator import index as as_int
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from selectconv.allocate.report import AllocationReport
from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError
from selectconv.files import read_json_lines

Log = str | PathLike[str] | Iterable[Mapping[str, Any]]


def read_log(log: Log, *, epochs: int | None = None) -> list[AllocationReport]:
    """Read what each step did.

    Args:
        log: the path of a jsonl file, or its rows. The unfinished last line of a killed process
            does not count.
        epochs: the length of the training: each row must be a step of one of its epochs. None: any
            epoch, and steps on demand, which have none.

    Raises:
        AllocationError: the file cannot be read, or a row is damaged; the message says which.
    """
    if isinstance(log, str | PathLike):
        where = f"{log}, line"
        rows = enumerate(read_json_lines(Path(log), error=AllocationError), start=1)
    elif isinstance(log, Mapping | Tensor) or not isinstance(log, Iterable):
        raise AllocationError(
            f"`log` must be the path of a jsonl file or its rows, got {type(log).__name__}."
        )
    else:
        where, rows = "row", enumerate(log)
    reports = []
    for number, row in rows:
        try:
            reports.append(_read_row(row, epochs))
        except AllocationError as error:
            raise AllocationError(f"{where} {number}: {error}") from error
    return reports


def _read_row(row: Any, epochs: int | None) -> AllocationReport:
    if not isinstance(row, Mapping) or not {"epoch", "layers"} <= set(row):
        raise AllocationError(f"a row of the log needs `epoch` and `layers`, got {row!r:.60}.")
    try:
        epoch = None if row["epoch"] is None else as_int(row["epoch"])
    except TypeError as error:
        raise AllocationError(
            f"`epoch` must be an integer or null, got {row['epoch']!r}."
        ) from error
    if epochs is not None and (epoch is None or not 0 <= epoch < epochs):
        raise AllocationError(f"`epoch` must be from 0 to {epochs - 1}, got {epoch}.")
    plan = AllocationPlan.from_dict(row["layers"])
    for name, layer in plan:
        lowest = min([*layer.closed.tolist(), *layer.opened.tolist(), *layer.source.tolist(), 0])
        if lowest < 0:
            raise AllocationError(f"`{name}`: slots and channels count from 0, got {lowest}.")
    return AllocationReport(epoch, plan)
