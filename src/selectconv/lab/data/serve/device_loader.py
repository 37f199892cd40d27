"""A whole data set on the device, with the augmentation of a batch in a handful of operations."""

from collections.abc import Iterator

import torch
from torch import Tensor

from selectconv.core.threads import one_thread
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.serve.batches import Batch, Loader, draw_epoch

_KEPT_BYTES = 24 << 20


class DeviceLoader(Loader):
    """Batches of an `ImageSet` that lives as uint8 on the device.

    In training each image is shifted by up to `info.padding` pixels (a random crop of the image
    with a black frame, as in the common scheme: black before normalisation) and, if `info.flip`,
    mirrored with probability one half. Order and augmentation of an epoch depend on `seed` and the
    epoch only: not on the device, the global random state, the batch size or the number of
    processes. Within a batch the mirrored images come last, which makes them fast to mirror and
    changes nothing else, since the order is random. How ranks share the batches: `BatchPlan`. At
    test time the order is fixed and nothing is augmented.

    Args:
        images: the images; they are copied to `device`, in training with their frame.
        info: their data set: padding, flip, mean, std.
        batch_size: images of this process's batch.
        train: shuffle and augment.
        device: where the images live and the batches appear.
        seed: of order and augmentation.
        rank: this process.
        world_size: number of processes.
        channels_last: memory format of the batches.

    Raises:
        TypeError, ValueError: an argument that is not accepted.

    Example:
        >>> info = DatasetInfo("toy", "Toy", 2, (1, 4, 4), 6, 6, 1, True, (0.5,), (0.25,))
        >>> toy = ImageSet(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
        >>> loader = DeviceLoader(toy, info, 4, train=True, seed=0)
        >>> [tuple(images.shape) for images, labels in loader.epoch(0)]
        [(4, 1, 4, 4), (2, 1, 4, 4)]
    """

    def __init__(
        self,
        images: ImageSet,
        info: DatasetInfo,
        batch_size: int,
        *,
        train: bool,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        channels_last: bool = False,
    ):
        if tuple(images.images.shape[1:]) != info.shape:
            raise ValueError(
                f"`images` must have shape (N, {', '.join(map(str, info.shape))}), got "
                f"{tuple(images.images.shape)}."
            )
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
        self._info = info
        self._labels = images.labels.to(self._device)
        std = torch.tensor(info.std, dtype=torch.float64)
        mean = torch.tensor(info.mean, dtype=torch.float64)
        self._scale = (1 / (255 * std)).float().view(-1, 1, 1).to(self._device)
        self._offset = (-mean / std).float().view(-1, 1, 1).to(self._device)
        if self._device.type == "cpu":
            # glibc keeps freed blocks for reuse up to the largest size it ever saw freed (at most
            # 32 MB), and gives larger ones back: without this, which touches no memory, each batch
            # comes in fresh pages, and these cost more than filling them.
            torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        if train:
            self._framed = _FramedImages(images.images.to(self._device), info.padding)
        else:
            self._images = images.images.to(self._device)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch."""
        return self._train_epoch(epoch) if self._train else self._test_epoch()

    def _test_epoch(self) -> Iterator[Batch]:
        for start, stop in self._plan:
            images = self._images[start:stop]
            with one_thread():
                batch = self._normalise(torch.empty_like(images, dtype=torch.float32), images)
                batch = batch.contiguous(memory_format=self._format)
            yield batch, self._labels[start:stop].clone()

    def _train_epoch(self, epoch: int) -> Iterator[Batch]:
        with one_thread():
            starts, labels, sizes = self._draw(epoch)
        first = 0
        for size, plain in sizes:
            here = slice(first, first + size)
            first += size
            with one_thread():
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
        order, top, left, mirrored = draw_epoch(
            self._plan.num_images,
            seed=self._seed,
            epoch=epoch,
            padding=self._info.padding,
            flip=self._info.flip,
        )
        spans = list(self._plan)
        sizes = torch.tensor([stop - start for start, stop in spans])
        number = torch.arange(len(spans)).repeat_interleave(sizes)
        position = torch.cat([torch.arange(start, stop) for start, stop in spans])
        num_plain = torch.bincount(number[~mirrored[position]], minlength=len(spans))
        position = position[torch.argsort(number * 2 + mirrored[position], stable=True)]
        starts = self._framed.starts(order[position], top[position], left[position])
        # Copied to the device once per epoch, so that no step waits for it.
        labels = self._labels[order[position].to(self._device)]
        counts = zip(sizes.tolist(), num_plain.tolist(), strict=True)
        return starts.to(self._device), labels, list(counts)

    def _normalise(self, batch: Tensor, images: Tensor) -> Tensor:
        return batch.copy_(images).mul_(self._scale).add_(self._offset)


class _FramedImages:
    # Images with a frame of zeros, in one flat run of bytes. A crop that starts at row y, column x
    # is then the strided view that starts at y * width + x: all crops of a batch, each with its own
    # corner, are runs of equal length and equal strides, which one `index_select` copies.

    def __init__(self, images: Tensor, padding: int):
        count, channels, height, width = images.shape
        rows, columns = height + 2 * padding, width + 2 * padding
        self._shape = (channels, height, width)
        self._strides = (rows * columns, columns, 1)
        self._image_bytes = channels * rows * columns
        self._bytes = torch.zeros(
            count * self._image_bytes, dtype=torch.uint8, device=images.device
        )
        framed = self._bytes.view(count, channels, rows, columns)
        framed[:, :, padding : padding + height, padding : padding + width] = images
        # From a crop's first byte to the one past its last.
        self._run = (channels - 1) * rows * columns + (height - 1) * columns + width
        self._scratch = torch.empty(0, dtype=torch.uint8)  # reused

    def starts(self, index: Tensor, top: Tensor, left: Tensor) -> Tensor:
        # Where the crops of these images begin that have these corners in the framed image.
        return index * self._image_bytes + top * self._strides[1] + left

    def crop(self, starts: Tensor) -> Tensor:
        # uint8 (B, C, H, W), valid until the next call.
        if self._bytes.device.type == "cpu":
            return self._crop_runs(starts)
        return self._crop_bytes(starts)

    def _crop_runs(self, starts: Tensor) -> Tensor:
        size = len(starts)
        if self._scratch.shape != (size, self._run):
            self._scratch = torch.empty(size, self._run, dtype=torch.uint8)
        # Row i begins at byte i: the rows overlap.
        runs = self._bytes.as_strided((len(self._bytes) - self._run + 1, self._run), (1, 1))
        torch.index_select(runs, 0, starts, out=self._scratch)
        return self._scratch.as_strided((size, *self._shape), (self._run, *self._strides))

    def _crop_bytes(self, starts: Tensor) -> Tensor:
        # Accelerators gather single bytes: no view that overlaps itself.
        offsets = sum(
            (torch.arange(size, device=starts.device) * stride).view(-1, *[1] * (2 - dim))
            for dim, (size, stride) in enumerate(zip(self._shape, self._strides, strict=True))
        )
        return self._bytes[starts.view(-1, 1, 1, 1) + offsets]
