"""Batches of image files, decoded by worker processes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from selectconv.checks import check_count
from selectconv.errors import DataError
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.read.image_folder import ImageFolder, Key
from selectconv.lab.data.serve.batches import Batch, BatchPlan, Loader, epoch_generator


class _Keys(Sampler[list[Key]]):
    # The batches of keys of one epoch, drawn in the main process.

    def __init__(self, plan: BatchPlan, train: bool, seed: int):
        self._plan, self._train, self._seed = plan, train, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[Key]]:
        if not self._train:
            for start, stop in self._plan:
                yield list(range(start, stop))
            return
        generator = epoch_generator(self._seed, self.epoch)
        size = self._plan.num_images
        order = torch.randperm(size, generator=generator)
        seeds = torch.randint(2**62, (size,), generator=generator)
        for start, stop in self._plan:
            yield list(zip(order[start:stop].tolist(), seeds[start:stop].tolist(), strict=True))


@dataclass(frozen=True)
class _Guarded(Dataset[tuple[Tensor, int] | str]):
    # An error in a worker arrives as a traceback in one long string: send its sentence instead.
    folder: ImageFolder

    def __getitem__(self, key: Key) -> tuple[Tensor, int] | str:
        try:
            return self.folder[key]
        except DataError as error:
            return str(error)


def _collate(samples: list[tuple[Tensor, int] | str]) -> Batch | str:
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, str):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    return torch.stack(images), torch.tensor(labels)


class FolderLoader(Loader):
    """Batches of an `ImageFolder`, decoded by worker processes, normalised on the device.

    Order and augmentation depend on `seed` and the epoch only, as in `DeviceLoader`, and not on the
    number of workers. The global random state is not touched.

    Args:
        images: the images.
        info: their data set: mean, std.
        batch_size: images of this process's batch.
        train: shuffle and augment.
        device: where the batches appear.
        seed: of order and augmentation.
        rank: this process.
        world_size: number of processes.
        channels_last: memory format of the batches.
        workers: number of processes that decode; 0: this process does it. None: one per core, at
            most 8.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
    """

    def __init__(
        self,
        images: ImageFolder,
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
    ):
        if workers is None:
            workers = min(8, os.cpu_count() or 1)
        check_count("workers", workers, 0)
        super().__init__(
            len(images),
            batch_size,
            train=train,
            device=device,
            seed=seed,
            rank=rank,
            world_size=world_size,
            channels_last=channels_last,
        )
        self._mean = torch.tensor(info.mean, device=self._device).view(-1, 1, 1) * 255
        self._std = torch.tensor(info.std, device=self._device).view(-1, 1, 1) * 255
        self._keys = _Keys(self._plan, train, seed)
        self._loader: DataLoader[Any] = DataLoader(
            _Guarded(images),
            batch_sampler=self._keys,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=self._device.type == "cuda",
            # Its own, or each epoch would draw from the global one.
            generator=torch.Generator(),
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch.

        Raises:
            DataError: an image cannot be decoded.
        """
        check_count("epoch", epoch, 0)
        self._keys.epoch = epoch
        for batch in self._loader:
            if isinstance(batch, str):
                raise DataError(batch)
            images, labels = (part.to(self._device, non_blocking=True) for part in batch)
            images = images.to(torch.float32, memory_format=self._format)
            yield images.sub_(self._mean).div_(self._std), labels
