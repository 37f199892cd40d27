"""Downloads that appear whole and checked, or not at all."""

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from selectconv.errors import DataError
from selectconv.files import replacing
from selectconv.lab.data.progress import progress_bar

_CHUNK = 1 << 18
# Seconds without a single byte before we give up.
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Download:
    """A published file.

    Attributes:
        url: where it is.
        md5: its published checksum.
        max_bytes: the most it may have; nothing beyond that is written.
    """

    url: str
    md5: str
    max_bytes: int

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


def download(source: Download, folder: Path, *, timeout_s: float = _TIMEOUT_S) -> Path:
    """Download a file into `folder`: into a `.part` file beside, checked, then renamed.

    Raises:
        DataError: it is not available, or is not what was published; nothing is left behind.
    """
    target = folder / source.file_name
    try:
        with replacing(target, shared=True) as part:
            with part.open("wb") as file:
                digest = _receive(source, file, timeout_s)
            if digest != source.md5:
                raise DataError(f"{source.url} has the MD5 {digest}, wanted {source.md5}.")
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer too, and holds the connection
        message = f"{source.url} is not available: status {error.code}, {error.reason}."
        raise DataError(message) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the address
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{source.url} is not available: {reason}.") from error
    return target


def _receive(source: Download, file: BinaryIO, timeout_s: float) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    request = urllib.request.Request(source.url, headers={"User-Agent": "selectconv"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        if response.status != 200:
            raise DataError(f"{source.url} answered with status {response.status}, wanted 200.")
        length = response.headers.get("Content-Length")
        announced = int(length) if length is not None and length.isdigit() else None
        if announced is not None and announced > source.max_bytes:
            raise DataError(
                f"{source.url} announces {announced:,} bytes, wanted at most {source.max_bytes:,}."
            )
        received = 0
        with progress_bar(source.file_name, announced, of_bytes=True) as advance:
            while chunk := response.read(_CHUNK):
                received += len(chunk)
                if received > source.max_bytes:
                    raise DataError(
                        f"{source.url} sends more than the {source.max_bytes:,} bytes accepted."
                    )
                digest.update(chunk)
                file.write(chunk)
                advance(len(chunk))
        # A connection that breaks ends `read` with the same empty bytes as a complete answer.
        if announced is not None and received != announced:
            raise DataError(f"{source.url} broke off after {received:,} of {announced:,} bytes.")
    return digest.hexdigest()
