"""`selectconv bench data`: our batches beside the same augmentation, image by image through PIL."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.bench.subject import Subject
from selectconv.lab.bench.timing import Rows, in_turn, ratios, row
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.loaders import Batching, draw_epoch, epoch_generator, make_loader
from selectconv.lab.data.registry import dataset_info

_IMAGES, _BATCH, _SEED = 50_000, 128, 0
_TOLERANCE = 1e-5


def measure_data(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Measure training batches of images like CIFAR-10's on the CPU, whatever the subject.

    Both sides make the same batches from the same draws, which is checked before anything is
    measured.

    Raises:
        DataError: Pillow is not installed.
    """
    info, draw = dataset_info("cifar10"), epoch_generator(_SEED, 0)
    images = torch.randint(256, (_IMAGES, *info.shape), generator=draw, dtype=torch.uint8)
    labels = torch.randint(info.num_classes, (_IMAGES,), generator=draw)
    batching = Batching(_BATCH, train=True, seed=_SEED)
    loader = make_loader(ImageSet(images, labels), info, batching)
    ours = chain.from_iterable(map(loader.epoch, count()))
    theirs = chain.from_iterable(map(partial(_augment_by_image, images, info), count()))
    difference = float((next(ours)[0] - next(theirs)).abs().max())
    assert difference <= _TOLERANCE, f"the sides differ by {difference}: no comparison"
    whole, single = in_turn(
        {"whole": partial(next, ours), "single": partial(next, theirs)}, repeats
    ).values()
    return [
        row("data", "whole batches", [_BATCH / seconds for seconds in whole], "images/s"),
        row("data", "image by image through PIL", [_BATCH / s for s in single], "images/s"),
        row("data", "whole batches over PIL", ratios(single, whole), "x"),
    ]


def _augment_by_image(images: Tensor, info: DatasetInfo, epoch: int) -> Iterator[Tensor]:
    """Yield an epoch's batches.

    These are the steps of torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize,
    without what its classes add to them, and the stacking of the default collation.
    """
    pillow = import_extra("PIL.Image", "The comparison with PIL", error=DataError)
    expand = import_extra("PIL.ImageOps", "The comparison with PIL", error=DataError).expand
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (info.mean, info.std))
    _, height, width = info.shape

    def augment(index: int, top: int, left: int, mirrored: bool) -> Tensor:
        image = expand(pillow.fromarray(pixels[index]), info.padding)
        image = image.crop((left, top, left + width, top + height))
        if mirrored:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return tensor.to(torch.float32).div_(255).sub_(mean).div_(std)

    draws = draw_epoch(len(images), seed=_SEED, epoch=epoch, padding=info.padding, flip=info.flip)
    for batch in zip(*(draw.split(_BATCH) for draw in draws), strict=True):
        samples = zip(*(draw.tolist() for draw in batch), strict=True)
        # Mirrored ones last, as `DeviceLoader` has them.
        yield torch.stack([augment(*sample) for sample in sorted(samples, key=itemgetter(3))])
