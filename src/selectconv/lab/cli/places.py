"""Check where a command may write, before it does any work."""

import os
from pathlib import Path

from selectconv.errors import UsageError
from selectconv.lab.train.run_folder import OWN


def check_folder(path: str | Path) -> Path:
    """Return a folder to write into; it need not exist.

    Raises:
        UsageError: it cannot be one.
    """
    folder = Path(path)
    if not str(path):
        raise UsageError("`out` must be a folder, got an empty name.")
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"`out` must be a folder, and {place} is a file.")
            if not os.access(place, os.W_OK | os.X_OK):
                raise UsageError(f"`out` must be a folder that can be written to; {place} cannot.")
            break
    return folder


def check_file(path: str | Path) -> Path:
    """Return a file to write; neither it nor its folder need exist.

    Raises:
        UsageError: it cannot be one.
    """
    file = Path(path)
    if not str(path) or file.is_dir():
        raise UsageError(f"`out` must be a file, got {'a folder, ' if str(path) else ''}{path!r}.")
    check_folder(file.parent)
    return file


def check_output(given: str | None, default: Path) -> Path:
    """Return the file that a verb writes, in a folder that exists.

    Args:
        given: where the user wants it; None: at `default`.
        default: its place in the run's folder.

    Raises:
        UsageError: it cannot be written there.
    """
    if given is None:
        return default
    file = check_file(given)
    if file.name in OWN and file.resolve().parent == default.parent.resolve():
        raise UsageError(f"{file} belongs to the run itself: choose another `out`.")
    if not file.parent.is_dir():
        raise UsageError(f"{file} cannot be written: there is no folder {file.parent}.")
    return file
