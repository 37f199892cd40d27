"""Images in memory, the description of their data set, and the fixed choice of a subset."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selectconv.checks import check_count
from selectconv.errors import DataError

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

    def __post_init__(self) -> None:
        channels = self.shape[0]
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(
                f"`mean` and `std` need {channels} values, got {self.mean!r} and {self.std!r}."
            )
        if min(self.std) <= 0:
            raise ValueError(f"`std` must be positive, got {self.std!r}.")
        check_count("padding", self.padding, 0)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and their labels, in memory.

    Attributes:
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                "`images` must be uint8 of shape (N, C, H, W), got "
                f"{self.images.dtype} of shape {tuple(self.images.shape)}."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"`labels` must be int64 of shape ({len(self.images)},), got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> "ImageSet":
        """Return the images at `index` (int64), in that order."""
        return ImageSet(self.images[index], self.labels[index])


def subset_index(num_images: int, size: int) -> Tensor:
    """Return which `size` of `num_images` images a subset has: int64 (size,).

    The first ones of a permutation that depends on `num_images` only, so a smaller subset is the
    start of a larger one.

    Raises:
        TypeError, ValueError: `size` is not an integer from 1 to `num_images`.

    Example:
        >>> subset_index(60_000, 4).tolist()
        [1055, 35744, 11724, 11086]
    """
    check_count("size", size, 1)
    if size > num_images:
        raise ValueError(f"`size` must be at most {num_images:,} (all images), got {size:,}.")
    permutation = np.random.RandomState([_SUBSET_SEED, num_images]).permutation(num_images)
    return torch.from_numpy(permutation[:size].astype(np.int64))


def check_labels(labels: Tensor, num_classes: int, where: object) -> None:
    """Check that every label names a class.

    Raises:
        DataError: one does not; `where` is named.
    """
    wrong = torch.nonzero((labels < 0) | (labels >= num_classes)).flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{where}: image {first:,} has label {int(labels[first])}, wanted 0 to "
            f"{num_classes - 1}; {len(wrong):,} labels are wrong: damaged, or from another set."
        )
