"""Testing a network of a run: its loss and its error on images that it was not trained on."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from selectconv.allocate.report import AllocationReport
from selectconv.lab.data.catalogue import Images
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.loaders import Batching, Loader, make_loader
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


def load_part(
    images: Images, info: DatasetInfo, config: TrainConfig, fabric: Fabric, *, train: bool = False
) -> Loader:
    """Build this process's loader of some of a run's images."""
    batching = Batching(
        config.batch_size // fabric.world_size,
        train=train,
        device=fabric.device,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        channels_last=config.channels_last,
    )
    return make_loader(images, info, batching)


@torch.no_grad()
def evaluate(
    network: nn.Module, loaders: Iterable[Loader], fabric: Fabric, display: Display, epoch: int = 0
) -> dict[str, Any]:
    """Test a network, as `fabric` set it up: the content of holdout.json.

    Returns:
        The number of images, the error in per cent and the mean loss.
    """
    network.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, wrong answers, images
    for loader in loaders:
        for images, labels in display.batches(loader, epoch, "test"):
            logits = network(images).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            wrong = (logits.argmax(dim=1) != labels).sum()
            sums += torch.tensor([float(loss), float(wrong), len(labels)]).double()
    loss, wrong, count = sum_over_ranks(fabric, sums).tolist()
    return {"images": int(count), "error": 100 * wrong / count, "loss": loss / count}


def sum_over_ranks(fabric: Fabric, values: Tensor) -> Tensor:
    """Add up the values of all processes."""
    if fabric.world_size == 1:
        return values
    summed = fabric.all_reduce(values.to(fabric.device), reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed.cpu()
