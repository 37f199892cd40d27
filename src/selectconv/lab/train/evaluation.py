"""Testing a network of a run: its loss and its error on images that it was not trained on."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from selectconv.allocate.report import AllocationReport
from selectconv.lab.data.catalogue import Images
from selectconv.lab.data.loaders import Batching, Loader, make_loader
from selectconv.lab.data.registry import Splits
from selectconv.lab.train.config import TrainConfig

Batches = Iterable[tuple[Tensor, Tensor]]


class Display(Protocol):
    """Where a run shows its progress."""

    def batches(self, loader: Loader, epoch: int, what: str) -> Batches:
        """Yield an epoch's batches while showing how far it is."""
        ...

    def epoch_done(self, row: dict[str, Any], report: AllocationReport) -> None:
        """Show an epoch's line of metrics."""
        ...


class Evaluation:
    """A network with the images of its run.

    Args:
        config: the run's settings.
        fabric: devices, precision and processes.
        splits: the data set.

    Attributes:
        wrapped: the network as `fabric` set it up; whoever makes an evaluation sets it.
    """

    wrapped: nn.Module

    def __init__(self, config: TrainConfig, fabric: Fabric, splits: Splits) -> None:
        self.config = config
        self.fabric = fabric
        if config.batch_size % fabric.world_size:
            raise ValueError(
                f"`batch_size` {config.batch_size} must be a multiple of {fabric.world_size}, the "
                "number of processes: each takes an equal part of every batch."
            )
        self.splits = splits
        self.test_loader: Loader | None = None
        if splits.test is not None:
            self.test_loader = self.build_loader(splits.test, train=False)

    def evaluate(self, display: Display, epoch: int) -> tuple[float | None, float | None]:
        """Compute the test loss and the test error in per cent; None without test images."""
        if self.test_loader is None:
            return None, None
        loss, error, _ = self._test([self.test_loader], display, epoch, "test")
        return loss, error

    def evaluate_holdout(self, display: Display) -> dict[str, Any]:
        """Test on every image that was not trained on: the content of holdout.json."""
        loaders = [self.build_loader(images, train=False) for images in self.splits.holdout]
        loss, error, count = self._test(loaders, display, self.config.epochs - 1, "holdout")
        return {"images": count, "error": error, "loss": loss}

    def build_loader(self, images: Images, *, train: bool) -> Loader:
        """Build this process's loader of some of the images."""
        batching = Batching(
            self.config.batch_size // self.fabric.world_size,
            train=train,
            device=self.fabric.device,
            seed=self.config.seed,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            channels_last=self.config.channels_last,
        )
        return make_loader(images, self.splits.info, batching)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Add up the values of all processes."""
        if self.fabric.world_size == 1:
            return values
        summed = self.fabric.all_reduce(values.to(self.fabric.device), reduce_op="sum")
        assert isinstance(summed, Tensor)
        return summed.cpu()

    def _test(
        self, loaders: Iterable[Loader], display: Display, epoch: int, what: str
    ) -> tuple[float, float, int]:
        """Compute the mean loss, the error in per cent and the number of images."""
        self.wrapped.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # loss, wrong answers, images
        with torch.no_grad():
            for loader in loaders:
                for images, labels in display.batches(loader, epoch, what):
                    logits = self.wrapped(images).float()
                    loss = F.cross_entropy(logits, labels, reduction="sum")
                    wrong = (logits.argmax(dim=1) != labels).sum()
                    sums += torch.tensor([float(loss), float(wrong), len(labels)]).double()
        loss, wrong, count = self.sum_over_ranks(sums).tolist()
        return loss / count, 100 * wrong / count, int(count)
