"""What verbs print and where they may write, which is checked before any work."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selectconv.errors import UsageError
from selectconv.lab.train.run_folder import CONFIG, OWN


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one line per row."""
    for row in rows:
        print(json.dumps(row))


def check_folder(path: str | Path) -> Path:
    """Return a folder to write into; it need not exist.

    Raises:
        UsageError: it cannot be one.
    """
    folder = Path(path)
    if not str(path):
        raise UsageError("`out` must be a folder, got an empty name.")
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
    if not str(path) or file.is_dir():
        raise UsageError(f"`out` must be a file, got {str(path)!r}, which is none.")
    if file.name in OWN and (file.parent / CONFIG).exists():
        raise UsageError(f"{file} belongs to a run: choose another `out`.")
    check_folder(file.parent)
    return file
