"""One process at a time in a folder: a lock that the system releases when its process dies."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selectconv.errors import RunError, UsageError
from selectconv.files import write_text

LOCK, HOLDER = ".lock", ".lock.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is created if need be, while the block runs.

    Raises:
        UsageError: another process holds it; the message names that one.
        RunError: the folder cannot be created.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {error.strerror}.") from error
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{folder} is in use by {_name_holder(folder)}: wait until it ends, stop it, or choose "
            "another --out."
        ) from None
    try:
        holder = {"pid": os.getpid(), "host": platform.node()}
        write_text(folder / HOLDER, json.dumps(holder) + "\n")
        yield
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def check_free(folder: Path) -> None:
    """Refuse a folder that another process holds; nothing is created.

    Raises:
        UsageError: another process holds it; the message names that one.
    """
    if (folder / LOCK).exists():
        with locked(folder):
            return


def _name_holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
