"""Which images go into which batch of which process, and where an epoch's randomness comes from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selectconv.checks import check_count

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BatchPlan:
    """Cuts an epoch into global batches, and each of them into the ranks' shares.

    A global batch has `world_size * batch_size` images, and rank r takes the r-th run of
    `batch_size`: two ranks with batches of 32 see together exactly what one process with batches
    of 64 sees. A last, smaller global batch is shared as evenly as it goes.

    Attributes:
        num_images: images of an epoch, over all ranks.
        batch_size: images of a rank's batch.
        rank: this process.
        world_size: number of processes.
        in_step: leave out a last batch with fewer images than ranks, so that every rank takes the
            same number of steps (training). Otherwise ranks without a share skip it (test).

    Example:
        >>> list(BatchPlan(10, 2, rank=1, world_size=2))
        [(2, 4), (6, 8), (9, 10)]
    """

    num_images: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    in_step: bool = True

    def __post_init__(self) -> None:
        check_count("num_images", self.num_images, 1)
        check_count("batch_size", self.batch_size, 1)
        check_count("world_size", self.world_size, 1)
        check_count("rank", self.rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"`rank` must be less than {self.world_size}, got {self.rank}.")
        if self.in_step and len(self) == 0:
            raise ValueError(
                f"{self.num_images:,} images give no batch of {self.batch_size} for each of "
                f"{self.world_size} processes; use a smaller `batch_size` or more images."
            )

    def __len__(self) -> int:
        full, rest = divmod(self.num_images, self.batch_size * self.world_size)
        enough = self.world_size if self.in_step else self.rank + 1
        return full + (rest >= enough)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield, for each of this rank's batches, the first position and the one past the last."""
        whole = self.batch_size * self.world_size
        for number in range(len(self)):
            size = min(whole, self.num_images - number * whole)
            share, extra = divmod(size, self.world_size)
            start = number * whole + self.rank * share + min(self.rank, extra)
            yield start, start + share + (self.rank < extra)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of one epoch: on the CPU, so that every device sees the same draws."""
    check_count("seed", seed, 0)
    check_count("epoch", epoch, 0)
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
        batch_size: images of this process's batch.
        train: shuffle and augment.
        device: where the batches appear.
        seed: of order and augmentation.
        rank: this process.
        world_size: number of processes.
        channels_last: memory format of the batches.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        *,
        train: bool,
        device: torch.device | str,
        seed: int,
        rank: int,
        world_size: int,
        channels_last: bool,
    ):
        self._plan = BatchPlan(num_images, batch_size, rank, world_size, in_step=train)
        epoch_generator(seed, 0)  # refuses a wrong seed now rather than in the first epoch
        self._train, self._seed = train, seed
        self._device = torch.device(device)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._plan)

    @property
    def num_images(self) -> int:
        """Images of an epoch, over all ranks."""
        return self._plan.num_images

    @abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch.

        Args:
            epoch: 0-based; without effect at test time.

        Yields:
            Images, float32 (B, C, H, W), normalised, and labels, int64 (B,).
        """
