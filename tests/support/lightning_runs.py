"""What the Lightning callback must do, in a process of its own: `lightning_runs.py FOLDER`.

Prints a line of JSON; `test_lightning.py` checks it.
"""

import copy
import doctest
import json
import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import selectconv as sc
from selectconv.integrations import lightning as integration
from selectconv.integrations.lightning import ChannelAllocation
from tiny_models import allocation_of, conv_net, images, silence

EPOCHS = 6
OPTIONS = {"gamma": 0.2, "grace": 1}


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):  # what a budget counts
        return self.net(x)

    def training_step(self, batch, number):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class TwoOptimizers(Module):
    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False
        self.other = nn.Linear(2, 2)

    def training_step(self, batch, number):
        super().training_step(batch, number).backward()
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.other.parameters()), super().configure_optimizers()]


def loader():
    return DataLoader(TensorDataset(*images(64)), batch_size=16)


def fit(folder, module, callbacks, *, epochs=EPOCHS, ckpt_path=None, validate=False, **options):
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=callbacks, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        num_sanity_val_steps=0, enable_checkpointing=any(
            isinstance(callback, ModelCheckpoint) for callback in callbacks
        ), **options,
    )  # fmt: skip
    trainer.fit(module, loader(), loader() if validate else None, ckpt_path=ckpt_path)
    return trainer


def fresh():
    torch.manual_seed(0)
    return Module(conv_net())


def by_hand():
    """The same training as a plain loop."""
    module = fresh()
    net, optimizer = module.net, module.configure_optimizers()
    allocator = sc.ChannelAllocator(net, optimizer, total_epochs=EPOCHS, **OPTIONS)
    for epoch in range(EPOCHS):
        net.train()
        for x, labels in loader():
            optimizer.zero_grad()
            F.cross_entropy(net(x), labels).backward()
            optimizer.step()
        allocator.step(epoch)
    return net


def same(a, b):
    b = b.state_dict()
    return all(torch.equal(value, b[name]) for name, value in a.state_dict().items())


def refusal(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(folder):
    said = {}
    expected = by_hand()
    moved = [m for name, m in allocation_of(expected).items() if name.endswith("moved")]
    said["moved by hand"] = sum(int(m.sum()) for m in moved)

    module, callback = fresh(), ChannelAllocation(**OPTIONS)
    trainer = fit(f"{folder}/a", module, [callback])
    said["same as by hand"] = same(expected, module.net)
    said["logged"] = {name: float(value) for name, value in trainer.logged_metrics.items()}
    said["epochs of reports"] = [report.epoch for report in callback.reports]

    for when in ("train", "validation"):
        # Three epochs, then the rest in other objects, from the checkpoint of the third epoch.
        saving = ModelCheckpoint(
            f"{folder}/{when}", filename="{epoch}", save_top_k=-1,
            save_on_train_epoch_end=when == "train",
        )  # fmt: skip
        uninterrupted = fresh()
        fit(f"{folder}/b", uninterrupted, [ChannelAllocation(**OPTIONS), saving], validate=True)
        resumed, callback = fresh(), ChannelAllocation(**OPTIONS)
        fit(
            f"{folder}/c", resumed, [callback], validate=True,
            ckpt_path=f"{folder}/{when}/epoch=1.ckpt",
        )  # fmt: skip
        said[f"resumed from {when}"] = same(uninterrupted.net, resumed.net)
        said[f"steps after {when}"] = [report.epoch for report in callback.reports]

    module = fresh()
    follower = copy.deepcopy(module)
    callback = ChannelAllocation(**OPTIONS, followers=[follower], log=False)
    trainer = fit(f"{folder}/d", module, [callback])
    index = [n for n in allocation_of(module) if n.endswith("index")]
    said["follower follows"] = all(
        torch.equal(allocation_of(follower)[n], allocation_of(module)[n]) for n in index
    )
    said["logged without log"] = sorted(trainer.logged_metrics)

    torch.manual_seed(0)
    two, callback = TwoOptimizers(conv_net()), ChannelAllocation(**OPTIONS)
    silence(two.net)
    fit(f"{folder}/e", two, [callback], epochs=2)
    said["optimizer of the layers"] = len(callback.reports)

    x = images(1)[0]
    budgeted = ChannelAllocation(**OPTIONS, target_macs=0.7, example_input=x)
    module = fresh()
    dense = sc.count(module.net, x).macs
    fit(f"{folder}/h", module, [budgeted], epochs=4)
    said["part left by the budget"] = sc.count(module.net, x).macs / dense

    said["refusals"] = [
        refusal(lambda: ChannelAllocation(gamma=2.0)),
        refusal(lambda: ChannelAllocation(mode="selct")),
        refusal(lambda: ChannelAllocation(gama=0.1)),
        refusal(lambda: ChannelAllocation(target_macs=1.5)),
        refusal(lambda: fit(f"{folder}/f", Module(conv_net(convert=False)), [ChannelAllocation()])),
        refusal(lambda: fit(f"{folder}/g", fresh(), [ChannelAllocation()], epochs=-1, max_steps=1)),
    ]
    said["doctests"] = list(doctest.testmod(integration))
    print(json.dumps(said))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    main(sys.argv[1])
