"""One interface to the batches of every data set."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from selectconv.data.image_set import DatasetInfo, ImageSet
from selectconv.data.read.image_folder import ImageFolder
from selectconv.data.serve.batches import Batch
from selectconv.data.serve.device_loader import DeviceLoader
from selectconv.data.serve.folder_loader import FolderLoader


class Loader(Protocol):
    """What a training loop needs: `DeviceLoader` and `FolderLoader` both are one."""

    def __len__(self) -> int:
        """Batches of an epoch."""

    @property
    def num_images(self) -> int:
        """Images of an epoch, over all ranks."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch."""


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
    drop_last: bool = False,
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
        "drop_last": drop_last,
        "channels_last": channels_last,
    }
    if isinstance(images, ImageFolder):
        return FolderLoader(images, info, batch_size, workers=workers, **common)
    return DeviceLoader(images, info, batch_size, **common)
