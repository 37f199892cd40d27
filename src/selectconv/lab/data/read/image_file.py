"""Decode one image file, of whatever format, with Pillow."""

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


_GRAY = ("1", "L", "LA")
_DEEP = ("I", "I;16", "I;16L", "I;16B", "F")  # Pillow would cut their values off at 255


def open_image(path: Path, size: tuple[int, int] | None = None, *, channels: int = 3) -> Any:
    """Return the decoded image, as RGB or as grayscale, whatever mode it is stored in.

    Args:
        path: an image file.
        size: the (width, height) it must have, checked before decoding. None: any.
        channels: 3 for RGB, to which grayscale is turned; 1 for grayscale, where colour is refused.

    Raises:
        DataError: it cannot be decoded, has another size or more than 8 bits per pixel, or is in
            colour where grayscale is wanted.
    """
    pillow = import_pillow()
    try:
        with pillow.open(path) as image:
            if size is not None and image.size != size:
                have, want = (f"{width}x{height}" for width, height in (image.size, size))
                raise DataError(f"{path} has {have} pixels, wanted {want}.")
            if image.mode in _DEEP:
                raise DataError(
                    f"{path} has more than 8 bits per pixel (mode {image.mode}): save it with 8."
                )
            if channels == 1 and image.mode not in _GRAY:
                raise DataError(
                    f"{path} is in colour, but the first training image is grayscale: save all "
                    "images in the same mode."
                )
            return image.convert("L" if channels == 1 else "RGB")
    # Damaged files raise whatever the decoder stumbles over.
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be decoded: {error}.") from error


def look_at(path: Path) -> tuple[int, tuple[int, int]]:
    """Return an image's number of channels (1 or 3) and its (width, height), from its header.

    Raises:
        DataError: it is not an image.
    """
    pillow = import_pillow()
    try:
        with pillow.open(path) as image:
            return 1 if image.mode in (*_GRAY, *_DEEP) else 3, image.size
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be decoded: {error}.") from error
