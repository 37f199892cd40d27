"""How fast are the batches, beside the same augmentation done image by image through PIL?"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from selectconv.checks import check_count
from selectconv.core.threads import one_thread
from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.data.serve.batches import draw_epoch, epoch_generator
from selectconv.lab.data.serve.device_loader import DeviceLoader

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class DataBench:
    """The result of `bench_data`.

    Attributes:
        images_per_second: of `DeviceLoader`: crop, flip and normalisation of whole batches.
        pil_images_per_second: of the same, image by image through PIL, in one process.
        ratio: the first over the second, median over the repeats.
        ratio_min: the smallest of the repeats.
        ratio_max: the largest of the repeats.
        repeats: how often both were measured, in turn.
        batch_size: images of a batch.
    """

    images_per_second: float
    pil_images_per_second: float
    ratio: float
    ratio_min: float
    ratio_max: float
    repeats: int
    batch_size: int


def bench_data(
    *, num_images: int = 50_000, batch_size: int = 128, repeats: int = 7, seed: int = 0
) -> DataBench:
    """Measure training batches of images like CIFAR-10's on the CPU.

    Both sides make the same batches from the same draws, which is checked before anything is
    measured. They are measured in turn, both on one thread: what `DeviceLoader` uses anyway, and
    all that work on one image at a time can use.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
        DataError: Pillow is not installed.
    """
    check_count("repeats", repeats, 1)
    check_count("batch_size", batch_size, 1)
    check_count("num_images", num_images, 2 * batch_size)
    info = dataset_info("cifar10")
    draw = epoch_generator(seed, 0)
    images = torch.randint(256, (num_images, *info.shape), generator=draw, dtype=torch.uint8)
    labels = torch.randint(info.num_classes, (num_images,), generator=draw)
    loader = DeviceLoader(ImageSet(images, labels), info, batch_size, train=True, seed=seed)
    by_image = _PerImage(images, info, batch_size, seed)
    # Few batches of the slow side, many of the fast one: about equal times.
    most = num_images // batch_size - 1
    few, many = min(4, most), min(200, most)
    fast, slow = [], []
    with one_thread():
        _check_equal(next(loader.epoch(0))[0], next(by_image.epoch(0)))
        for repeat in range(repeats):
            fast.append(many * batch_size / _seconds(loader.epoch(repeat), many))
            slow.append(few * batch_size / _seconds(by_image.epoch(repeat), few))
    ratios = [ours / theirs for ours, theirs in zip(fast, slow, strict=True)]
    return DataBench(
        images_per_second=statistics.median(fast),
        pil_images_per_second=statistics.median(slow),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        repeats=repeats,
        batch_size=batch_size,
    )


def _check_equal(ours: Tensor, theirs: Tensor) -> None:
    difference = float((ours - theirs).abs().max())
    assert difference <= _TOLERANCE, f"the sides differ by {difference}: no comparison"


def _seconds(batches: Iterator[object], num_batches: int) -> float:
    # From the second batch on: the first one waits for the epoch's draws.
    next(batches)
    start = time.process_time()
    for _ in range(num_batches):
        next(batches)
    return time.process_time() - start


class _PerImage:
    # The steps of torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize, without
    # what its classes add to them, and the stacking of the default collation.

    def __init__(self, images: Tensor, info: DatasetInfo, batch_size: int, seed: int):
        purpose = "The comparison with PIL"
        self._pillow = import_extra("PIL.Image", purpose, error=DataError)
        self._expand = import_extra("PIL.ImageOps", purpose, error=DataError).expand
        self._images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self._info, self._batch_size, self._seed = info, batch_size, seed
        self._mean = torch.tensor(info.mean).view(-1, 1, 1)
        self._std = torch.tensor(info.std).view(-1, 1, 1)

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        info = self._info
        draws = draw_epoch(
            len(self._images), seed=self._seed, epoch=epoch, padding=info.padding, flip=info.flip
        )
        for batch in zip(*(draw.split(self._batch_size) for draw in draws), strict=True):
            # Mirrored ones last, as `DeviceLoader` has them.
            samples = sorted(
                zip(*(draw.tolist() for draw in batch), strict=True), key=itemgetter(3)
            )
            yield torch.stack([self._sample(*sample) for sample in samples])

    def _sample(self, index: int, top: int, left: int, mirrored: bool) -> Tensor:
        _, height, width = self._info.shape
        image = self._expand(self._pillow.fromarray(self._images[index]), self._info.padding)
        image = image.crop((left, top, left + width, top + height))
        if mirrored:
            image = image.transpose(self._pillow.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
