"""Decode image files, of whatever format, with Pillow."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.data.progress import progress_bar

_GRAY = ("1", "L", "LA")
_DEEP = ("I", "I;16", "I;16L", "I;16B", "F")  # Pillow would cut their values off at 255


def import_pillow() -> Any:
    """Return Pillow's `Image` module.

    Raises:
        DataError: Pillow is not installed.
    """
    return import_extra("PIL.Image", "Decoding images", error=DataError)


def open_image(path: Path, channels: int | None = None) -> Any:
    """Return the decoded image, as RGB or as grayscale, whatever mode it is stored in.

    Args:
        path: an image file.
        channels: 3 for RGB, to which grayscale is turned; 1 for grayscale, where colour is refused.
            None: as the file has it.

    Raises:
        DataError: it cannot be decoded, has more than 8 bits per pixel, or is in colour where
            grayscale is wanted.
    """
    pillow = import_pillow()
    try:
        with pillow.open(path) as image:
            if image.mode in _DEEP:
                raise DataError(
                    f"{path} has more than 8 bits per pixel (mode {image.mode}): save it with 8."
                )
            is_gray = image.mode in _GRAY
            if channels == 1 and not is_gray:
                raise DataError(
                    f"{path} is in colour, but the first training image is grayscale: save all "
                    "images in the same mode."
                )
            return image.convert("L" if is_gray and channels != 3 else "RGB")
    # Damaged files raise whatever the decoder stumbles over.
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be decoded: {error}.") from error


def centre_crop(image: Any, size: int, *, margin: float = 1.0) -> Any:
    """Return the middle of an image whose shorter side was resized to `margin * size`."""
    shorter = round(size * margin)
    width, height = image.size
    # The longer side is rounded down, as in the common code: 500x375 becomes 341x256.
    new = tuple(shorter * side // min(width, height) for side in (width, height))
    left, top = (round((side - size) / 2) for side in new)
    resized = image.resize(new, resample=import_pillow().Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def as_tensor(image: Any) -> Tensor:
    """Return an image's pixels: uint8 (C, H, W)."""
    width, height = image.size
    return torch.from_numpy(np.array(image)).view(height, width, -1).permute(2, 0, 1)


def decode_images(paths: Sequence[Path], shape: tuple[int, int, int], title: str) -> Tensor:
    """Decode the middle of image files, each resized by its shorter side: uint8 (N, C, H, W).

    Raises:
        DataError: an image cannot be decoded; the first one is named.
    """
    channels, size, _ = shape
    images = torch.empty(len(paths), *shape, dtype=torch.uint8)
    with progress_bar(f"decoding {title}", len(paths)) as advance, ThreadPoolExecutor() as pool:
        decoded = pool.map(
            lambda path: as_tensor(centre_crop(open_image(path, channels), size)), paths
        )
        for row, pixels in enumerate(decoded):
            images[row] = pixels
            advance(1)
    return images
