"""What verbs print: a table in a console that is wide enough, or one JSON line per row."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console


def print_lines(rows: Iterable[Mapping[str, Any]]) -> int:
    """Print one JSON line per row; returns the exit code."""
    for row in rows:
        print(json.dumps(row))
    return 0


def wide_console(width: int) -> Console:
    """Return a console as wide as the terminal, or `width` columns where there is no terminal."""
    return Console(width=None if Console().is_terminal else width, markup=False)
