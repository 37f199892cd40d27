"""Unpack an archive: each member is checked first, and the result appears whole or not at all."""

import gzip
import io
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
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

    Only regular files and folders are accepted: links, devices, absolute paths, `..`, anything
    outside `top`, a second member of the same name and more than `max_bytes` of content are
    refused. Permissions, owners and times of the archive are not taken over.

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
    try:
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=f".{top}.", ignore_cleanup_errors=True
        ) as scratch:
            check = _Check(archive, Path(scratch), top, max_bytes)
            with archive.open("rb") as raw:
                _unpack(raw, check)
            if not (check.folder / top).is_dir():
                raise DataError(f"{archive} has no folder {top!r}.")
            _rename(check.folder / top, target)
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{archive} is damaged or truncated: {error}.") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {error}.") from error
    return target


def _rename(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError:
        # Another process was faster: its result is as good as ours.
        if not target.is_dir():
            raise


class _Check:
    # Refuses what the libraries accept or repair, member by member, before it is unpacked.

    def __init__(self, archive: Path, folder: Path, top: str, max_bytes: int):
        self.archive, self.folder, self.max_bytes = archive, folder, max_bytes
        self._top, self._bytes, self._members = top, 0, 0

    def __call__(self, name: str, size: int, is_folder: bool, is_file: bool) -> None:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        # A colon (drive letters) and a backslash are separators on Windows.
        strange = name.startswith("/") or ".." in parts or any(mark in name for mark in "\\:\0")
        if strange or not parts:
            raise DataError(f"{self.archive} is refused: member {name!r} leads out of its folder.")
        if not (is_folder or is_file) or size < 0:
            raise DataError(
                f"{self.archive} is refused: member {name!r} is neither a file nor a folder."
            )
        if parts[0] != self._top:
            raise DataError(
                f"{self.archive} has {'/'.join(parts)!r}, wanted everything inside {self._top!r}."
            )
        path = self.folder.joinpath(*parts)
        if os.path.lexists(path) and not (is_folder and path.is_dir()):
            raise DataError(f"{self.archive} has {'/'.join(parts)!r} twice.")
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise DataError(f"{self.archive} has more than {_MAX_MEMBERS:,} members.")
        self._bytes += size
        if self._bytes > self.max_bytes:
            raise self.too_large()

    def too_large(self) -> DataError:
        return DataError(f"{self.archive} unpacks to more than {self.max_bytes:,} bytes.")


def _unpack(raw: IO[bytes], check: _Check) -> None:
    magic = raw.read(4)
    raw.seek(0)
    if magic == b"PK\x03\x04":
        _unpack_zip(raw, check)
    elif magic[:2] == b"\x1f\x8b":
        with gzip.open(raw) as unzipped:
            _unpack_tar(cast(IO[bytes], unzipped), check)
    else:
        _unpack_tar(raw, check)


def _unpack_zip(raw: IO[bytes], check: _Check) -> None:
    with zipfile.ZipFile(raw) as members:
        for member in members.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            is_file = not member.is_dir() and kind in (0, stat.S_IFREG)
            # The name as stored: ZipFile cuts the other one at a zero byte. The size as announced:
            # ZipFile reads no more than that, and notices by the checksum that there was more.
            check(member.orig_filename, member.file_size, member.is_dir(), is_file)
            members.extract(member, check.folder)


def _unpack_tar(stream: IO[bytes], check: _Check) -> None:
    limited = _Limited(stream, check)
    # Stream mode ("r|"): reads forward only, so no member can send us back.
    with tarfile.open(
        fileobj=cast(Any, limited), mode="r|", tarinfo=_StrictHeader, errorlevel=2
    ) as members:
        for member in members:
            is_file = member.isreg() and not member.issparse()
            check(member.name, member.size, member.isdir(), is_file)
            members.extract(member, check.folder, filter=_without_attributes)
    # gzip checks its checksum at the end only.
    while limited.read(_CHUNK):
        pass


def _without_attributes(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    return tarfile.data_filter(member, folder).replace(
        mode=cast(int, None), mtime=cast(float, None), deep=False
    )


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
    # A stream that is refused when it is longer than a tar file with the most content can be:
    # headers count too, whatever they announce.

    def __init__(self, stream: IO[bytes], check: _Check):
        self._stream, self._check = stream, check
        self._left = 2 * check.max_bytes + _TAR_OVERHEAD

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(_CHUNK if size is None or size < 0 else size)
        self._left -= len(chunk)
        if self._left < 0:
            raise self._check.too_large()
        return chunk
