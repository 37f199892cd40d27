"""Smaller images of a data set, for experiments that a small machine can afford."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from selectconv.checks import check_count
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read.image_folder import ImageFolder


def shrunk_info(info: DatasetInfo, image_size: int) -> DatasetInfo:
    """Describe a data set whose images are shrunk: their shape, and the padding of their crops.

    Mean and deviation stay those of the full images: averaging pixels keeps the mean, and the
    slightly smaller deviation does not matter.

    Raises:
        TypeError, ValueError: the size does not divide the images' own, or the data set's images
            are cropped from files.
    """
    check_count("image_size", image_size, 1)
    channels, height, width = info.shape
    if info.name == "imagenet":
        raise ValueError("`image_size` is for sets of small images; imagenet's are cropped to 224.")
    if height % image_size or width % image_size:
        raise ValueError(
            f"`image_size` must divide {height}, the size of {info.name}'s images; "
            f"got {image_size}."
        )
    padding = info.padding * image_size // height
    return replace(info, shape=(channels, image_size, image_size), padding=padding)


def shrink_images(images: ImageSet | ImageFolder, image_size: int) -> ImageSet:
    """Shrink images to a whole fraction of their size: each pixel is the mean of those it covers.

    Example:
        >>> images = torch.tensor([[0, 2, 8, 8], [4, 2, 8, 8]] * 2, dtype=torch.uint8)
        >>> shrink_images(ImageSet(images[None, None], torch.zeros(1).long()), 2).images.tolist()
        [[[[2, 8], [2, 8]]]]
    """
    assert isinstance(images, ImageSet)  # `shrunk_info` refuses the others
    factor = images.images.shape[-1] // image_size
    parts = [
        F.avg_pool2d(part.float(), factor).round().to(images.images.dtype)
        for part in images.images.split(4096)  # as floats, all of them would need a lot of memory
    ]
    return ImageSet(torch.cat(parts), images.labels)
