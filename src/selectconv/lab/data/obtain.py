"""Download a file and unpack an archive: the result appears whole and checked, or not at all."""

import gzip
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selectconv.errors import BadValue, DataError
from selectconv.files import replacing
from selectconv.lab.data.progress import progress_bar

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0  # without a single byte
# What the libraries raise for archives; RuntimeError: a compression or encryption that is unknown.
_REFUSED = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def download(url: str, md5: str, path: Path, max_bytes: int) -> Path:
    """Download a published file to `path`.

    Raises:
        DataError: it is not available, larger than `max_bytes`, or its checksum is another; there
            is no file then, or the old one.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "selectconv"})
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with (
            replacing(path, shared=True) as part,
            part.open("wb") as file,
            urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response,
        ):
            with progress_bar(path.name, response.length, of_bytes=True) as advance:
                while chunk := response.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                    advance(len(chunk))
                    if file.tell() > max_bytes:
                        raise DataError(f"{url} sends more than {max_bytes:,} bytes.")
            if digest.hexdigest() != md5:  # a connection that broke off ends here, too
                raise DataError(
                    f"{url} sent {file.tell():,} bytes of MD5 {digest.hexdigest()}, wanted {md5}."
                )
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the answer too, and holds the connection
        raise DataError(f"{url} is not available: {error}.") from error
    return path


def unpack(archive: Path, target: Path, max_bytes: int) -> Path:
    """Unpack the folder `target.name` of a .tar.gz or .zip file as `target`.

    Raises:
        DataError: the archive is damaged, has members that would lead out of the folder, or more
            than `max_bytes` of content; nothing is left behind.
    """
    extract = _extract_zip if archive.suffix == ".zip" else _extract_tar
    try:
        with made_whole(target) as scratch:
            extract(archive, scratch, max_bytes)
    except _REFUSED as error:
        raise DataError(f"{archive} is damaged or refused: {error}.") from error
    return target


def _extract_zip(archive: Path, folder: Path, max_bytes: int) -> None:
    with zipfile.ZipFile(archive) as members:
        if sum(member.file_size for member in members.infolist()) > max_bytes:
            raise BadValue(f"it holds more than {max_bytes:,} bytes")
        members.extractall(folder)  # no member leads out, is a link, or is larger than announced


def _extract_tar(archive: Path, folder: Path, max_bytes: int) -> None:
    size = 0
    with gzip.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as members:
            for member in members:
                size += member.size
                if size > max_bytes:
                    raise BadValue(f"it holds more than {max_bytes:,} bytes")
                members.extract(member, folder, filter="data")
        while stream.read(_CHUNK):  # gzip compares its checksum at the very end
            pass


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Lend a folder beside `target`: what the block puts there as `target.name` becomes `target`.

    Raises:
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)
        try:
            os.rename(Path(scratch) / target.name, target)
        except OSError:
            if not target.is_dir():  # else another process was faster: its result is as good
                raise
