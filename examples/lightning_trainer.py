"""A Lightning `Trainer` with the callback that allocates channels.

pip install 'selectconv[lightning]'
python examples/lightning_trainer.py [processes]
"""

import logging
import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from digits import TEST, TRAIN, accuracy, small_cnn
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import selectconv as sc
from selectconv.integrations.lightning import ChannelAllocation

EPOCHS = 6


class Digits(pl.LightningModule):
    """An ordinary module; converting the network is all that is new."""

    def __init__(self) -> None:
        super().__init__()
        self.net = sc.convert(small_cnn(), TEST[0][:1])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Compute the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train all parameters, the shifts with less decay."""
        return torch.optim.SGD(sc.param_groups(self), lr=0.05, momentum=0.9, weight_decay=1e-4)


def main(processes: int = 1) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    module = Digits()
    start = accuracy(module.net)
    allocation = ChannelAllocation(gamma=0.1, grace=2)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[allocation],
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*TRAIN), batch_size=64 // processes, shuffle=True)
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(*allocation.reports, sep="\n")
        logged = {name: int(value) for name, value in trainer.logged_metrics.items()}
        print(f"{trainer.world_size} processes; logged last: {logged}")
        print(f"test accuracy: {start:.3f} -> {accuracy(module.net):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
