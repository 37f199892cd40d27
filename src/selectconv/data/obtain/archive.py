"""Archives are unpacked beside, checked member by member, then renamed: whole or not at all."""

import gzip
import io
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from selectconv.errors import DataError

_CHUNK = 1 << 18
# Tiny-ImageNet has 120,609 members.
_MAX_MEMBERS = 500_000
# Headers and padding of a tar file, beside the content: a block or two for each member.
_TAR_OVERHEAD = 1 << 20
# zipfile raises RuntimeError for encrypted members, NotImplementedError for unknown compressions.
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, ValueError)


def extract(archive: Path, folder: Path, *, top: str, max_bytes: int) -> Path:
    """Unpack `archive`, whose members all live below `top`, to `folder / top`.

    Regular files and folders only: links, devices, absolute paths, `..` and anything outside `top`
    are refused, and so is more than `max_bytes` of content, counted as it is written. Permissions
    and owners of the archive are not taken over.

    Args:
        archive: a .tar, .tar.gz or .zip file, recognised by its content.
        folder: where the result goes; the temporary folder is made here.
        top: the archive's only top-level folder.
        max_bytes: the most content to write.

    Returns:
        `folder / top`. Where it exists already, it stays as it is.

    Raises:
        DataError: the archive is refused, damaged or truncated; `folder` is as before.
    """
    target = folder / top
    if target.exists():
        return target
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{top}."))
        left = max_bytes
        for number, (parts, content) in enumerate(_members(archive, max_bytes)):
            if number >= _MAX_MEMBERS:
                raise DataError(f"{archive} has more than {_MAX_MEMBERS:,} members.")
            if parts[:1] != (top,):
                raise DataError(
                    f"{archive} has {'/'.join(parts)!r}, wanted everything inside {top!r}."
                )
            path = temporary.joinpath(*parts)
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x": a second member of the same name is refused instead of replacing the first.
            with path.open("xb") as file:
                while chunk := content.read(_CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        raise DataError(f"{archive} unpacks to more than {max_bytes:,} bytes.")
                    file.write(chunk)
        if not (temporary / top).is_dir():
            raise DataError(f"{archive} has no folder {top!r}.")
        _rename(temporary / top, target)
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{archive} is damaged or truncated: {error}.") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {error}.") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _rename(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError:
        # Another process was faster: its result is as good as ours.
        if not target.is_dir():
            raise


def _members(archive: Path, max_bytes: int) -> Iterator[tuple[tuple[str, ...], IO[bytes] | None]]:
    # The path and the content of each member; None for a folder.
    with archive.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic == b"PK\x03\x04":
            yield from _zip_members(archive, raw)
        elif magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as unzipped:
                yield from _tar_members(archive, cast(IO[bytes], unzipped), max_bytes)
        else:
            yield from _tar_members(archive, raw, max_bytes)


def _zip_members(
    archive: Path, raw: IO[bytes]
) -> Iterator[tuple[tuple[str, ...], IO[bytes] | None]]:
    with zipfile.ZipFile(raw) as members:
        for member in members.infolist():
            # The name as stored: ZipFile cuts the other one at a zero byte.
            parts = _safe_parts(archive, member.orig_filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused_kind(archive, member.orig_filename)
            if member.is_dir():
                yield parts, None
            else:
                with members.open(member) as content:
                    yield parts, content


class _StrictHeader(tarfile.TarInfo):
    # tarfile takes a missing end mark and a damaged header for the end of the archive.

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_StrictHeader":
        if len(buf) == tarfile.BLOCKSIZE and not any(buf):
            return super().frombuf(buf, encoding, errors)  # raises the end of the archive
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.TarError as error:
            raise tarfile.ReadError(f"{error or 'no end mark'} instead of a member") from error


class _Limited(io.RawIOBase):
    # A stream that ends in an error after `limit` bytes: headers count too, whatever they announce.

    def __init__(self, stream: IO[bytes], limit: int, message: str):
        self._stream, self._left, self._message = stream, limit, message

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(_CHUNK if size is None or size < 0 else size)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(self._message)
        return chunk


def _tar_members(
    archive: Path, stream: IO[bytes], max_bytes: int
) -> Iterator[tuple[tuple[str, ...], IO[bytes] | None]]:
    limit = 2 * max_bytes + _TAR_OVERHEAD
    limited = _Limited(stream, limit, f"{archive} unpacks to more than {max_bytes:,} bytes.")
    # Stream mode ("r|"): reads forward only, so no member can send us back.
    with tarfile.open(
        fileobj=cast(Any, limited), mode="r|", tarinfo=_StrictHeader, errorlevel=2
    ) as members:
        for member in members:
            parts = _safe_parts(archive, member.name)
            if member.isdir():
                yield parts, None
            elif member.isreg() and not member.issparse() and member.size >= 0:
                content = members.extractfile(member)
                assert content is not None
                yield parts, content
            else:
                raise _refused_kind(archive, member.name)
    # gzip checks its checksum at the end only.
    while limited.read(_CHUNK):
        pass


def _safe_parts(archive: Path, name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    absolute = name.startswith("/")
    # A colon (drive letters) and a backslash are separators on Windows.
    if absolute or not parts or ".." in parts or any(mark in name for mark in "\\:\0"):
        raise DataError(f"{archive} is refused: member {name!r} leads out of its folder.")
    return parts


def _refused_kind(archive: Path, name: str) -> DataError:
    return DataError(f"{archive} is refused: member {name!r} is neither a file nor a folder.")
