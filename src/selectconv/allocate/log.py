"""The log of a training's allocations: a row for every step that changed something.

A row is `{"epoch": 3, "layers": {name: {"closed": [4], "opened": [[slot, source, shift]]}}}`,
as `AllocationReport.to_dict` gives it and as a run's `allocation.jsonl` holds it, a line each.
"""

import json
from collections.abc import Iterable, Mapping
from operator import index as as_int
from os import PathLike
from pathlib import Path
from typing import Any

from selectconv.core.allocation import AllocationPlan
from selectconv.errors import AllocationError

Log = str | PathLike[str] | Iterable[Mapping[str, Any]]
Event = tuple[int | None, AllocationPlan]


def read_log(log: Log) -> list[Event]:
    """Read the epoch (None: on demand) and the plan of each row.

    Args:
        log: the path of a jsonl file, or rows. What a killed process left of a last line does not
            count.

    Raises:
        AllocationError: the file cannot be read, or a row is not one; the message says which.
    """
    if isinstance(log, str | PathLike):
        rows = _read_lines(Path(log))
    elif isinstance(log, Mapping) or not isinstance(log, Iterable):
        raise AllocationError(
            f"`log` must be the path of a jsonl file or rows of it, got {type(log).__name__}."
        )
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(log)]
    return [_read_row(where, row) for where, row in rows]


def _read_lines(path: Path) -> list[tuple[str, Any]]:
    try:
        lines = path.read_text().split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AllocationError(f"the log {path} cannot be read: {reason}.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append((f"{path}, line {number}", json.loads(line)))
        except ValueError as error:
            raise AllocationError(f"{path}, line {number}, is not JSON: {error}.") from error
    return rows


def _read_row(where: str, row: Any) -> Event:
    if not isinstance(row, Mapping) or not {"epoch", "layers"} <= set(row):
        raise AllocationError(f"{where}: a row of the log needs `epoch` and `layers`, got {row!r}.")
    try:
        epoch = None if row["epoch"] is None else as_int(row["epoch"])
        return epoch, AllocationPlan.from_dict(row["layers"])
    except TypeError as error:
        raise AllocationError(
            f"{where}: `epoch` must be an integer or null, got {row['epoch']!r}."
        ) from error
    except AllocationError as error:
        raise AllocationError(f"{where}: {error}") from error
