"""What verbs print and where they may write, which is checked before any work."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selectconv.errors import UsageError
from selectconv.lab.train.run_folder import CONFIG, OWN
from selectconv.tables import text_table


def print_rows(
    rows: Sequence[Mapping[str, Any]], *, as_json: bool = False, columns: Sequence[str] = ()
) -> None:
    """Print rows of figures: a table for people, or one JSON line per row.

    Args:
        rows: at least one.
        as_json: whether to print JSON.
        columns: what the table shows; none: everything.
    """
    if as_json:
        print("\n".join(map(json.dumps, rows)))
        return
    heads = columns or list(rows[0])
    right = [n for n, head in enumerate(heads) if isinstance(rows[0].get(head), int | float)]
    lines = [[_show(row.get(head)) for head in heads] for row in rows]
    print(text_table([[head.replace("_", " ") for head in heads], *lines], right))


def _show(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)


def check_folder(path: str | Path) -> Path:
    """Return a folder to write into; it need not exist.

    Raises:
        UsageError: it cannot be one.
    """
    folder = Path(path)
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        raise UsageError(f"`out` must be a folder, and {place} is a file.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"`out` must be a folder that can be written to; {place} cannot.")
    return folder


def check_file(path: str | Path) -> Path:
    """Return a file to write; neither it nor its folder need exist.

    Raises:
        UsageError: it cannot be one, or is a run's own.
    """
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"`out` must be a file, got {str(path)!r}.")
    if file.name in OWN and (file.parent / CONFIG).exists():
        raise UsageError(f"{file} belongs to a run: choose another `out`.")
    check_folder(file.parent)
    return file
