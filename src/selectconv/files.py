"""Files that appear whole or not at all, lines of JSON, and the cache folder."""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from selectconv.errors import RunError, SelectConvError


def cache_folder() -> Path:
    """Return the folder for what can be fetched or made again; it need not exist.

    It is `selectconv` in `$XDG_CACHE_HOME`, or in `~/.cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "selectconv"


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Lend a path beside `path`; what the block writes there replaces `path` when the block ends.

    A reader sees the old file or the new one. If the block fails, the old one stays and nothing is
    left beside it.

    Args:
        path: the file to write.
        shared: whether other processes may write the same file at the same time. If so, the path
            beside is unique; otherwise it is always `NAME.part`, which overwrites what a killed
            process left.

    Raises:
        OSError: the file cannot be written.
    """
    name = f".{path.name}.{secrets.token_hex(4)}.part" if shared else f"{path.name}.part"
    beside = path.parent / name  # `with_name` refuses "."
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")  # such as /dev/null: it would go
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # a second failure must not hide the first
            beside.unlink(missing_ok=True)
        raise


def write_whole(
    path: Path,
    content: bytes,
    *,
    error: type[SelectConvError] = RunError,
    shared: bool = False,
) -> None:
    """Write a file as `replacing` does.

    Args:
        path: the file to write.
        content: what it will hold.
        error: what to raise.
        shared: as for `replacing`.

    Raises:
        SelectConvError: of the class `error`: the file cannot be written.
    """
    try:
        with replacing(path, shared=shared) as beside:
            beside.write_bytes(content)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        kept = "; what it held before is kept" if os.path.exists(path) else ""
        raise error(f"{path} cannot be written: {reason}{kept}.") from problem


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, in UTF-8.

    Raises:
        RunError: the file cannot be written.
    """
    write_whole(path, text.encode())


def read_json_lines(path: Path, *, error: type[SelectConvError] = RunError) -> list[Any]:
    """Read a file with one JSON value per line, without the unfinished last line of a killed run.

    Raises:
        SelectConvError: of the class `error`: the file cannot be read, or a line is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be read: {reason}.") from problem
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as problem:
            raise error(f"{path}, line {number}, is not JSON: {problem}.") from problem
    return rows
