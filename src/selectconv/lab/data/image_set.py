"""Images in memory, the description of their data set, and the fixed choice of a subset."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selectconv.checks import check_count
from selectconv.errors import BadValue, DataError

# The permutation of `subset` is part of the contract (equal subsets in all runs and versions),
# so it comes from NumPy's legacy generator, whose stream is frozen.
_SUBSET_SEED = 2019


@dataclass(frozen=True)
class DatasetInfo:
    """What a training needs to know about a data set.

    Attributes:
        name: what users type.
        title: what people call it.
        num_classes: number of classes.
        shape: (C, H, W) of the images a network gets.
        num_train: training images of the full set.
        num_test: test images of the full set.
        padding: random translation in pixels, by zero-padded random crops.
        flip: random horizontal flips in training.
        mean: per channel, of the training set, for pixels in [0, 1].
        std: likewise, over all pixels of the training set.
        classes: their names by label, where the images are the user's own.
    """

    name: str
    title: str
    num_classes: int
    shape: tuple[int, int, int]
    num_train: int
    num_test: int
    padding: int
    flip: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()

    def shrunk(self, image_size: int) -> "DatasetInfo":
        """Describe the same data set with smaller images: their shape, and the padding of crops.

        Mean and deviation stay those of the full images: averaging pixels keeps the mean, and the
        slightly smaller deviation does not matter.

        Raises:
            TypeError, ValueError: the size does not divide the images' own, or the data set's
                images are cropped from files.
        """
        check_count("image_size", image_size, 1)
        channels, height, _ = self.shape
        if self.name == "imagenet":
            raise BadValue(
                "`image_size` is for sets of small images; imagenet's are cropped to 224."
            )
        if height % image_size:
            raise BadValue(
                f"`image_size` must divide {height}, the size of {self.name}'s images; "
                f"got {image_size}."
            )
        padding = self.padding * image_size // height
        return replace(self, shape=(channels, image_size, image_size), padding=padding)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and their labels, in memory.

    Attributes:
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> "ImageSet":
        """Return the images at `index` (int64), in that order."""
        return ImageSet(self.images[index], self.labels[index])

    def shrunk(self, image_size: int) -> "ImageSet":
        """Shrink the images to a whole fraction of their size: means of the pixels they cover.

        Example:
            >>> images = torch.tensor([[0, 2, 8, 8], [4, 2, 8, 8]] * 2, dtype=torch.uint8)
            >>> ImageSet(images[None, None], torch.zeros(1).long()).shrunk(2).images.tolist()
            [[[[2, 8], [2, 8]]]]
        """
        factor = self.images.shape[-1] // image_size
        parts = [
            F.avg_pool2d(part.float(), factor).round().to(torch.uint8)
            for part in self.images.split(4096)  # as floats, all of them would need a lot of memory
        ]
        return ImageSet(torch.cat(parts), self.labels)


def label_images(
    images: np.ndarray, labels: np.ndarray, num_classes: int, where: object
) -> ImageSet:
    """Join images (N, C, H, W) and their labels (N,), both as bytes.

    Raises:
        DataError: there is not one label for each image, or it names no class; `where` is named.
    """
    if len(labels) != len(images):
        raise DataError(f"{where} has {len(labels):,} labels for {len(images):,} images.")
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        raise DataError(
            f"{where}: image {wrong[0]:,} has label {labels[wrong[0]]}, wanted 0 to "
            f"{num_classes - 1}: damaged, or from another set."
        )
    return ImageSet(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64)))


def subset_index(num_images: int, size: int) -> Tensor:
    """Return which `size` of `num_images` images a subset has: int64 (size,).

    The first ones of a permutation that depends on `num_images` only, so a smaller subset is the
    start of a larger one.

    Example:
        >>> subset_index(60_000, 4).tolist()
        [1055, 35744, 11724, 11086]
    """
    permutation = np.random.RandomState([_SUBSET_SEED, num_images]).permutation(num_images)
    return torch.from_numpy(permutation[:size].astype(np.int64))
