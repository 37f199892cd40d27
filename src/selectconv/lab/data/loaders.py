"""Batches of images: this process's share of an epoch, shuffled and augmented.

Images in memory live on the device, and the augmentation of a batch is a handful of operations;
image files are decoded by worker processes.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from selectconv.core.threads import num_threads
from selectconv.errors import BadValue, DataError
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read.image_folder import ImageFolder, Key

Batch = tuple[Tensor, Tensor]
_KEPT_BYTES = 24 << 20


@dataclass(frozen=True)
class Batching:
    """How a process gets its batches.

    Attributes:
        batch_size: images of this process's batch.
        train: shuffle and augment.
        device: where the batches appear.
        seed: of order and augmentation.
        rank: this process.
        world_size: number of processes.
        channels_last: memory format of the batches.
        workers: number of processes that decode image files; 0: this process does it.
    """

    batch_size: int
    train: bool
    device: torch.device | str = "cpu"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    channels_last: bool = False
    workers: int = min(8, os.cpu_count() or 1)

    def cut(self, num_images: int) -> list[tuple[int, int]]:
        """Cut an epoch into global batches, and these into the ranks' shares; return this rank's.

        A global batch has `world_size * batch_size` images, and rank r takes the r-th run of
        `batch_size`: two ranks with batches of 32 see together exactly what one process with
        batches of 64 sees. A last, smaller global batch is shared as evenly as it goes. If it has
        fewer images than there are ranks, it is left out in training, so that every rank takes the
        same number of steps; in a test, ranks without a share skip it.

        Returns:
            For each batch, the position of its first image and the one past its last.

        Raises:
            ValueError: there is nothing to train on.

        Example:
            >>> Batching(2, train=True, rank=1, world_size=2).cut(10)
            [(2, 4), (6, 8), (9, 10)]
        """
        whole = self.batch_size * self.world_size
        spans = []
        for first in range(0, num_images, whole):
            share, extra = divmod(min(whole, num_images - first), self.world_size)
            start = first + self.rank * share + min(self.rank, extra)
            stop = start + share + (self.rank < extra)
            if share or (not self.train and start < stop):
                spans.append((start, stop))
        if self.train and not spans:
            raise BadValue(
                f"{num_images:,} images give no batch of {self.batch_size} for each of "
                f"{self.world_size} processes; use a smaller `batch_size` or more images."
            )
        return spans


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of one epoch: on the CPU, so that every device sees the same draws."""
    # SeedSequence mixes: neighbouring seeds and epochs share nothing.
    state = int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state >> 1)


def draw_epoch(size: int, *, seed: int, epoch: int, padding: int, flip: bool) -> tuple[Tensor, ...]:
    """Draw an epoch's order and augmentation, by position: four tensors of shape (size,).

    A draw belongs to a position of the epoch, whoever takes it and in whatever batch.

    Returns:
        Which image; the crop's first row and first column in the padded image; whether it is
            mirrored.
    """
    generator = epoch_generator(seed, epoch)
    order = torch.randperm(size, generator=generator)
    top, left = torch.randint(2 * padding + 1, (2, size), generator=generator)
    mirrored = torch.randint(2, (size,), generator=generator) == 1
    return order, top, left, mirrored if flip else torch.zeros_like(mirrored)


class Loader(ABC):
    """What a training loop needs: this rank's batches of each epoch.

    Args:
        num_images: images of an epoch, over all ranks.
        batching: how this process gets its batches.

    Raises:
        ValueError: there are too few images.
    """

    def __init__(self, num_images: int, batching: Batching):
        self.num_images = num_images
        self._batching = batching
        self._spans = batching.cut(num_images)
        self._device = torch.device(batching.device)
        self._format = torch.channels_last if batching.channels_last else torch.contiguous_format

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._spans)

    @abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch.

        Args:
            epoch: 0-based; without effect at test time.

        Yields:
            Images, float32 (B, C, H, W), normalised, and labels, int64 (B,).
        """


class DeviceLoader(Loader):
    """Batches of an `ImageSet` that lives as uint8 on the device.

    In training each image is shifted by up to `info.padding` pixels (a random crop of the image
    with a black frame, as in the common scheme: black before normalisation) and, if `info.flip`,
    mirrored with probability one half. Order and augmentation of an epoch depend on the seed and
    the epoch only: not on the device, the global random state, the batch size or the number of
    processes. Within a batch the mirrored images come last, which makes them fast to mirror and
    changes nothing else, since the order is random. At test time the order is fixed and nothing is
    augmented.

    Args:
        images: the images; they are copied to the device, in training with their frame.
        info: their data set: padding, flip, mean, std.
        batching: how this process gets its batches.

    Example:
        >>> info = DatasetInfo("toy", "Toy", 2, (1, 4, 4), 6, 6, 1, True, (0.5,), (0.25,))
        >>> toy = ImageSet(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
        >>> loader = DeviceLoader(toy, info, Batching(4, train=True))
        >>> [tuple(images.shape) for images, labels in loader.epoch(0)]
        [(4, 1, 4, 4), (2, 1, 4, 4)]
    """

    def __init__(self, images: ImageSet, info: DatasetInfo, batching: Batching):
        super().__init__(len(images), batching)
        self._info = info
        self._labels = images.labels.to(self._device)
        std = torch.tensor(info.std, dtype=torch.float64)
        mean = torch.tensor(info.mean, dtype=torch.float64)
        self._scale = (1 / (255 * std)).float().view(-1, 1, 1).to(self._device)
        self._offset = (-mean / std).float().view(-1, 1, 1).to(self._device)
        # glibc keeps freed blocks for reuse up to the largest size it ever saw freed (at most 32
        # MB), and gives larger ones back: without this, which touches no memory, each batch comes
        # in fresh pages, and these cost more than filling them.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        # A test has no crops, and needs no frame.
        padding = info.padding if batching.train else 0
        self._framed = _FramedImages(images.images.to(self._device), padding)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch."""
        if not self._spans:  # a rank without a share of a small test
            return
        with num_threads(1):
            starts, labels, sizes = self._draw(epoch)
        first = 0
        for size, plain in sizes:
            here = slice(first, first + size)
            first += size
            with num_threads(1):
                crops = self._framed.crop(starts[here])
                batch = torch.empty(crops.shape, dtype=torch.float32, device=self._device)
                # In two parts, each of which fits into a core's cache.
                self._normalise(batch[:plain], crops[:plain])
                self._normalise(batch[plain:], crops[plain:].flip(-1))
                batch = batch.contiguous(memory_format=self._format)
            yield batch, labels[here]

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        # Where this rank's crops start, their labels, and of each batch the number of images and
        # how many of them, the first ones, are not mirrored.
        size, spans = self.num_images, self._spans
        if self._batching.train:
            order, top, left, mirrored = draw_epoch(
                size,
                seed=self._batching.seed,
                epoch=epoch,
                padding=self._info.padding,
                flip=self._info.flip,
            )
        else:
            order, top = torch.arange(size), torch.zeros(size, dtype=torch.int64)
            left, mirrored = top, top.bool()
        sizes = torch.tensor([stop - start for start, stop in spans])
        number = torch.arange(len(spans)).repeat_interleave(sizes)
        position = torch.cat([torch.arange(start, stop) for start, stop in spans])
        num_plain = torch.bincount(number[~mirrored[position]], minlength=len(spans))
        position = position[torch.argsort(number * 2 + mirrored[position], stable=True)]
        starts = order * self._framed.image_bytes + top * self._framed.columns + left
        # Copied to the device once per epoch, so that no step waits for it.
        labels = self._labels[order[position].to(self._device)]
        counts = list(zip(sizes.tolist(), num_plain.tolist(), strict=True))
        return starts[position].to(self._device), labels, counts

    def _normalise(self, batch: Tensor, images: Tensor) -> None:
        batch.copy_(images).mul_(self._scale).add_(self._offset)


class _FramedImages:
    # Images with a frame of zeros, in one flat run of bytes. A crop that starts at row y, column x
    # is then the strided view that starts at y * width + x: all crops of a batch, each with its own
    # corner, are runs of equal length and equal strides, which one `index_select` copies.

    def __init__(self, images: Tensor, padding: int):
        _, channels, height, width = images.shape
        rows, self.columns = height + 2 * padding, width + 2 * padding
        self.image_bytes = channels * rows * self.columns
        self._shape = (channels, height, width)
        self._strides = (rows * self.columns, self.columns, 1)
        framed = F.pad(images, (padding,) * 4) if padding else images
        self._bytes = framed.contiguous().view(-1)
        # From a crop's first byte to the one past its last.
        self._run = ((channels - 1) * rows + height - 1) * self.columns + width
        self._scratch = torch.empty(0, dtype=torch.uint8)  # reused

    def crop(self, starts: Tensor) -> Tensor:
        # The crops that begin at these bytes: uint8 (B, C, H, W), valid until the next call.
        if self._bytes.device.type != "cpu":
            return self._gather(starts)
        size = len(starts)
        if self._scratch.shape != (size, self._run):
            self._scratch = torch.empty(size, self._run, dtype=torch.uint8)
        # Row i begins at byte i: the rows overlap.
        runs = self._bytes.as_strided((len(self._bytes) - self._run + 1, self._run), (1, 1))
        torch.index_select(runs, 0, starts, out=self._scratch)
        return self._scratch.as_strided((size, *self._shape), (self._run, *self._strides))

    def _gather(self, starts: Tensor) -> Tensor:
        # Accelerators gather single bytes: no view that overlaps itself.
        offsets = sum(
            (torch.arange(size, device=starts.device) * stride).view(-1, *[1] * (2 - dim))
            for dim, (size, stride) in enumerate(zip(self._shape, self._strides, strict=True))
        )
        return self._bytes[starts.view(-1, 1, 1, 1) + offsets]


@dataclass(frozen=True)
class _Decoded(Dataset[Batch | str]):
    # Decodes a batch of keys. An error in a worker arrives as a traceback in one long string: send
    # its sentence instead.
    folder: ImageFolder

    def __getitem__(self, keys: list[Key]) -> Batch | str:
        try:
            images, labels = zip(*(self.folder[key] for key in keys), strict=True)
        except DataError as error:
            return str(error)
        return torch.stack(images), torch.tensor(labels)


class FolderLoader(Loader):
    """Batches of an `ImageFolder`, decoded by worker processes, normalised on the device.

    Order and augmentation depend on the seed and the epoch only, as in `DeviceLoader`, and not on
    the number of workers. The global random state is not touched.

    Args:
        images: the images.
        info: their data set: mean, std.
        batching: how this process gets its batches.
    """

    def __init__(self, images: ImageFolder, info: DatasetInfo, batching: Batching):
        super().__init__(len(images), batching)
        self._images = _Decoded(images)
        self._mean = torch.tensor(info.mean, device=self._device).view(-1, 1, 1) * 255
        self._std = torch.tensor(info.std, device=self._device).view(-1, 1, 1) * 255

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch.

        Raises:
            DataError: an image cannot be decoded.
        """
        loader: DataLoader[Batch | str] = DataLoader(
            self._images,
            batch_size=None,
            sampler=self._draw(epoch),
            num_workers=self._batching.workers,
            pin_memory=self._device.type == "cuda",
            # Its own, or each epoch would draw from the global one.
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, str):
                raise DataError(batch)
            images, labels = (part.to(self._device, non_blocking=True) for part in batch)
            images = images.to(torch.float32, memory_format=self._format)
            yield images.sub_(self._mean).div_(self._std), labels

    def _draw(self, epoch: int) -> list[list[Key]]:
        """Draw the keys of this rank's batches: an image each and, in training, its own seed."""
        keys: list[Key] = list(range(self.num_images))
        if self._batching.train:
            generator = epoch_generator(self._batching.seed, epoch)
            order = torch.randperm(self.num_images, generator=generator)
            seeds = torch.randint(2**62, (self.num_images,), generator=generator)
            keys = list(zip(order.tolist(), seeds.tolist(), strict=True))
        return [keys[start:stop] for start, stop in self._spans]


def make_loader(images: ImageSet | ImageFolder, info: DatasetInfo, batching: Batching) -> Loader:
    """Return the loader that fits the images: on the device, or decoded by workers."""
    if isinstance(images, ImageFolder):
        return FolderLoader(images, info, batching)
    return DeviceLoader(images, info, batching)
