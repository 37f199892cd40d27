"""SHA-256 of a run's files: one that was damaged or changed is refused before it is used.

`manifest.json` is written once for the files of an epoch, and before them. It has their digests and
those of the files that they replace, which are accepted until the checkpoint, the last of them, is
in place. So a process that dies in between leaves a folder that can be read and resumed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selectconv.errors import RunError
from selectconv.files import write_text, write_whole

MANIFEST = "manifest.json"
CHECKPOINT, PREVIOUS = "last.ckpt", "previous.ckpt"


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the manifest, then each of the files whole, in their order.

    Args:
        folder: the run's folder.
        contents: of each file; a checkpoint comes last.

    Raises:
        RunError: one cannot be written; what is there is still accepted.
    """
    record = _read(folder)
    for name, content in contents.items():
        record["before"][name] = _digest(folder / name)
        record["files"][name] = hashlib.sha256(content).hexdigest()
    # The manifest has a digest, too: a file whose name is damaged there would not be checked.
    whole = {**record, "digest": _digest_of(record)}
    write_text(folder / MANIFEST, json.dumps(whole, indent=1) + "\n")
    for name, content in contents.items():
        write_whole(folder / name, content)


def is_unchanged(path: Path) -> bool:
    """Return whether a file is what the run wrote; a missing one, if it never wrote it.

    Raises:
        RunError: the file or the manifest cannot be read.
    """
    # A run may replace the file between a look at it and one at the manifest.
    return any(_is_accepted(path) for _ in range(3))


def _is_accepted(path: Path) -> bool:
    record, found = _read(path.parent), _digest(path)
    files, before = record["files"], record["before"]
    if found == files.get(path.name):
        return True
    if path.name == CHECKPOINT and found == files.get(PREVIOUS, "none"):
        return True  # the user has put the one before in its place
    is_complete = CHECKPOINT in files and _digest(path.parent / CHECKPOINT) == files[CHECKPOINT]
    return not is_complete and path.name in before and found == before[path.name]


def _digest(path: Path) -> str | None:
    """Return a file's digest; None if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error


def _digest_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> dict[str, dict[str, str | None]]:
    path = folder / MANIFEST
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record.pop("digest") != _digest_of(record):
            raise ValueError("it is not what the run wrote")
        return record
    except FileNotFoundError:
        return {"files": {}, "before": {}}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}; restore it, or train again.") from error
