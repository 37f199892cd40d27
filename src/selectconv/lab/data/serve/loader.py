"""The loader of any data set, whether it is in memory or a folder of files."""

from typing import Any

import torch

from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read.image_folder import ImageFolder
from selectconv.lab.data.serve.batches import Loader
from selectconv.lab.data.serve.device_loader import DeviceLoader
from selectconv.lab.data.serve.folder_loader import FolderLoader


def make_loader(
    images: ImageSet | ImageFolder,
    info: DatasetInfo,
    batch_size: int,
    *,
    train: bool,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    channels_last: bool = False,
    workers: int | None = None,
) -> Loader:
    """Return the loader that fits the images: on the device, or decoded by workers.

    The arguments are those of `DeviceLoader`; `workers` is for image folders only, see
    `FolderLoader`.
    """
    common: dict[str, Any] = {
        "train": train,
        "device": device,
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
        "channels_last": channels_last,
    }
    if isinstance(images, ImageFolder):
        return FolderLoader(images, info, batch_size, workers=workers, **common)
    return DeviceLoader(images, info, batch_size, **common)
