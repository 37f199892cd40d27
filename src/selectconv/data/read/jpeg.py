"""Decode one image file with Pillow."""

from pathlib import Path
from typing import Any

from selectconv.errors import DataError
from selectconv.extras import import_extra


def import_pillow() -> Any:
    """Return Pillow's `Image` module.

    Raises:
        DataError: Pillow is not installed.
    """
    return import_extra("PIL.Image", "Decoding images", error=DataError)


def open_rgb(path: Path, size: tuple[int, int] | None = None) -> Any:
    """Return the decoded image, as RGB, whatever mode it is stored in.

    Args:
        path: an image file.
        size: the (width, height) it must have, checked before decoding. None: any.

    Raises:
        DataError: it cannot be decoded or has another size.
    """
    pillow = import_pillow()
    try:
        with pillow.open(path) as image:
            if size is not None and image.size != size:
                have, want = (f"{width}x{height}" for width, height in (image.size, size))
                raise DataError(f"{path} has {have} pixels, wanted {want}.")
            return image.convert("RGB")
    # Damaged files raise whatever the decoder stumbles over.
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be decoded: {error}.") from error
