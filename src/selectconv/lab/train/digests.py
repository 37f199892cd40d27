"""SHA-256 of a run's files: one that was damaged or changed is refused before it is used.

`digests.json` has, for each file, the digests that it may have. A file is replaced in three steps:
the new digest is added to the old one, the file is renamed into place, the old digest is dropped.
A process that dies in between, even time and again, leaves a file that is still accepted. To a file
of lines (.jsonl) a line is appended in the same way; its last line does not count while it is
unfinished.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from selectconv.errors import RunError
from selectconv.files import write_text, write_whole

DIGESTS = "digests.json"
LINES = ".jsonl"


def write_recorded(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole, with `write(file)`, and record its digest.

    Raises:
        RunError: it cannot be written; what was there before is kept, and still accepted.
    """
    new: list[str] = []

    def announce(beside: Path) -> None:
        new.append(_digest(beside))
        # Version 0.1 recorded nothing: what it wrote is accepted until it is replaced.
        old = recorded(path) or ([_digest(path)] if path.exists() else [])
        record(path, [*old, *new])

    write_whole(path, write, finished=announce)
    record(path, new)


def append_recorded(path: Path, line: bytes) -> None:
    """Append a line to a file of lines, and record the digest of both.

    Raises:
        RunError: it cannot be written; the file ends where it ended before.
    """
    before = _read_bytes(path)
    record(path, [hashlib.sha256(content).hexdigest() for content in (before, before + line)])
    try:
        with path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):  # it may not exist; a second failure must not hide the first
            os.truncate(path, len(before))
        raise RunError(f"cannot append to {path}: {error.strerror or error}.") from error


def record(path: Path, digests: list[str]) -> None:
    """Set the digests that a file may have."""
    known = {**_read(path.parent), path.name: list(dict.fromkeys(digests))}
    # The record has a digest, too: a file whose name is damaged there would not be checked.
    whole = {**known, DIGESTS: [_digest_of(known)]}
    write_text(path.parent / DIGESTS, json.dumps(whole, indent=1) + "\n")


def settle(path: Path) -> None:
    """Keep only the digest that a file has, of those that it might have."""
    known = recorded(path)
    if len(known) > 1 and (found := _digest(path)) in known:
        record(path, [found])


def recorded(path: Path) -> list[str]:
    """Return the digests that a file may have; none for a file that was never recorded."""
    return _read(path.parent).get(path.name, [])


def has_digests(folder: Path) -> bool:
    """Return whether a run's files are recorded; those of version 0.1 are not."""
    return (folder / DIGESTS).exists()


def is_unchanged(path: Path, *others: Path) -> bool:
    """Return whether a file is what was written under its name or one of the other names.

    A file without a record counts as unchanged.

    Raises:
        RunError: the file or the record cannot be read.
    """
    for _ in range(3):  # a run may replace the file between a look at it and one at the record
        accepted = [digest for one in (path, *others) for digest in recorded(one)]
        if not accepted or _digest(path) in accepted:
            return True
    return False


def check_recorded(path: Path, remedy: str) -> None:
    """Refuse a file that is not what was written.

    Args:
        path: the file; one without a record passes.
        remedy: what to do about it, for the message.

    Raises:
        RunError: it was damaged or changed.
    """
    if not is_unchanged(path):
        raise RunError(f"{path} is damaged: it is not what the run wrote; {remedy}")


def _digest_of(known: dict[str, list[str]]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    if path.suffix == LINES:
        content = _read_bytes(path)
        return hashlib.sha256(content[: content.rfind(b"\n") + 1]).hexdigest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read_bytes(path: Path) -> bytes:
    """Read a file of lines; a missing file has no lines."""
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read(folder: Path) -> dict[str, list[str]]:
    path = folder / DIGESTS
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {str(name): [str(digest) for digest in of] for name, of in content.items()}
        own = known.pop(DIGESTS, None)
        if own is not None and own != [_digest_of(known)]:
            raise ValueError("it is not what the run wrote")
        return known
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(
            f"{path} is damaged: {error}; delete it to use the run's files without checking them."
        ) from error
