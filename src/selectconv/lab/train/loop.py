"""The training loop: read it from top to bottom with the supplement's section B open.

Everything random depends on the seed and the epoch alone, and a checkpoint is written after every
epoch, so a run that was killed at any moment and resumed ends with the same bits.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor, nn

from selectconv.allocate.optimizers import param_groups
from selectconv.allocate.report import AllocationReport
from selectconv.errors import BadType, BadValue, RunError, SelectConvError
from selectconv.lab.data.catalogue import Images
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.loaders import Batch, Batching, Loader, make_loader
from selectconv.lab.data.registry import Splits, load_dataset
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.network import (
    build_model,
    check_same_data,
    check_same_images,
    dump_checkpoint,
    dump_weights,
    fit_shapes,
    in_layout,
    load_checkpoint,
    run_data,
)
from selectconv.lab.train.run_folder import (
    ALLOCATION,
    BEST,
    CHECKPOINT,
    ENVIRONMENT,
    HOLDOUT,
    IMAGES,
    LAST,
    METRICS,
    PREVIOUS,
    TENSORBOARD,
    RunFolder,
    dump_lines,
    dump_page,
    is_first_process,
)

# How often the losses are looked at for NaN: a look waits for the device.
_LOOK_EVERY = 20

# What gloo and NCCL say when the other side of a connection is gone.
_LOST_RANK = re.compile(r"gloo|nccl|closed by peer|reset by peer|broken pipe", re.IGNORECASE)


class Display:
    """Where a run shows its progress; this one shows nothing."""

    def batches(self, loader: Loader, epoch: int, what: str) -> Iterable[Batch]:
        """Return an epoch's batches, which show how far it is."""
        return loader.epoch(epoch)

    def epoch_done(self, row: dict[str, Any], report: AllocationReport) -> None:
        """Show an epoch's line of metrics."""


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
    network: nn.Module, loaders: Sequence[Loader], fabric: Fabric, display: Display, epoch: int = 0
) -> dict[str, Any]:
    """Test a network, as `fabric` set it up: the content of holdout.json.

    Returns:
        The number of images, the error in per cent and the mean loss; nothing without images.
    """
    if not loaders:
        return {}
    network.eval()
    # Loss, wrong answers, images; read at the end, so that nothing waits for a GPU.
    rows = [torch.zeros(3, device=fabric.device)]
    for loader in loaders:
        for images, labels in display.batches(loader, epoch, "test"):
            logits = network(images).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            wrong = (logits.argmax(dim=1) != labels).sum()
            rows.append(torch.stack([loss, wrong.to(loss), torch.full_like(loss, len(labels))]))
    sums = torch.stack(rows).cpu().double().sum(0)
    loss, wrong, count = sum_over_ranks(fabric, sums).tolist()
    return {"images": int(count), "error": 100 * wrong / count, "loss": loss / count}


def sum_over_ranks(fabric: Fabric, values: Tensor) -> Tensor:
    """Add up the values of all processes."""
    if fabric.world_size == 1:
        return values
    return cast(Tensor, fabric.all_reduce(values.to(fabric.device), reduce_op="sum")).cpu()


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.SGD:
    """Build SGD as in supplement B.1: Nesterov without dampening, less decay on shifts."""
    groups = param_groups(model, config.weight_decay, config.shift_weight_decay)
    return torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0
    )


class Training:
    """A run in the making: everything that one epoch needs and changes.

    Args:
        config: its settings.
        fabric: devices, precision and processes.
        splits: the data set.
        state: a checkpoint to continue from; None: start at epoch 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        fabric: Fabric,
        splits: Splits,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.fabric, self.splits = config, fabric, splits
        self.train_loader = load_part(splits.train, splits.info, config, fabric, train=True)
        tested = [] if splits.test is None else [splits.test]
        self.test_loaders = [load_part(part, splits.info, config, fabric) for part in tested]
        self._steps = config.epochs * len(self.train_loader)
        torch.manual_seed(config.seed)
        self.model = build_model(config, splits.info)
        if state is not None:
            if config.method_info.cuts:
                fit_shapes(self.model, state["model"])
            self.model.load_state_dict(state["model"])
            in_layout(self.model, config)  # where it was slimmed, it has new tensors
        optimizer = self._set_up()
        self.method = config.method_info.build(config, splits.info, self.model, optimizer)
        self.best_error, self.next_epoch = float("inf"), 0
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
            self.method.load_state_dict(state["allocator"])
            self.best_error = state["best_error"]
            self.next_epoch = state["epoch"] + 1

    def _set_up(self) -> torch.optim.SGD:
        """Build the optimizer of the model as it is, compile it and wrap it for its processes."""
        optimizer = build_optimizer(self.config, self.model)
        compiled = torch.compile(self.model) if self.config.compile else self.model
        self.wrapped, self.optimizer = self.fabric.setup(cast(nn.Module, compiled), optimizer)
        return optimizer

    def run_epoch(self, epoch: int, display: Display) -> tuple[dict[str, Any], AllocationReport]:
        """Train, let the method act, and test what is saved; returns the metrics and the report."""
        # Dropout draws from the global generator: from the seed, the epoch and the rank alone.
        torch.manual_seed((self.config.seed * 100_003 + epoch) * 10_007 + self.fabric.global_rank)
        started = time.perf_counter()
        train_loss, images = self.train_epoch(epoch, display)
        elapsed = time.perf_counter() - started
        report = self.method.step(epoch)
        if report and self.config.method_info.cuts:
            in_layout(self.model, self.config)
            self._set_up()  # the layers that were cut have new parameters
        tested = evaluate(self.wrapped, self.test_loaders, self.fabric, display, epoch)
        row = {
            "epoch": epoch,
            "train_loss": train_loss,
            "test_loss": tested.get("loss"),
            "test_error": tested.get("error"),
            "lr": self.config.lr_at((epoch + 1) * len(self.train_loader) - 1, self._steps),
            "seconds": round(time.perf_counter() - started, 3),
            "images_per_second": round(images / elapsed, 1),
            **self.method.counts(self.model),
        }
        return row, report

    def state(self, epoch: int) -> dict[str, Any]:
        """Collect what a run needs to continue after `epoch`."""
        return {
            "epoch": epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "allocator": self.method.state_dict(),
            "best_error": self.best_error,
        }

    def train_epoch(self, epoch: int, display: Display) -> tuple[float, int]:
        """Train on every image once; returns the mean loss and the number of images."""
        self.wrapped.train()
        losses = torch.zeros(len(self.train_loader), device=self.fabric.device)
        counts = torch.zeros(len(self.train_loader))
        batches = display.batches(self.train_loader, epoch, "train")
        for number, (images, labels) in enumerate(batches):
            step = epoch * len(self.train_loader) + number
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr_at(step, self._steps)
            loss = F.cross_entropy(self.wrapped(images), labels)
            self.fabric.backward(loss)
            self.method.regularize()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[number] = loss.detach()
            counts[number] = len(labels)
            if (number + 1) % _LOOK_EVERY == 0 or number + 1 == len(losses):
                bad = (~losses.isfinite()).nonzero().flatten().tolist()
                if bad:
                    kept = "; its last checkpoint is kept" if epoch else ""
                    raise RunError(
                        f"the loss is {float(losses[bad[0]])} at epoch {epoch}, step {bad[0]}: the "
                        f"run stops{kept}. Try a smaller --lr."
                    )
        total = (losses.cpu().double() * counts).sum()
        sums = torch.stack([total, counts.double().sum()])
        total, count = sum_over_ranks(self.fabric, sums).tolist()
        return total / count, int(count)


def train(
    config: TrainConfig,
    fabric: Fabric,
    folder: RunFolder,
    display: Display,
    *,
    resume: bool = False,
    repeats: Sequence[RunFolder] = (),
) -> dict[str, Any]:
    """Run a training to its end, writing its folder as it goes.

    Args:
        config: the settings; when resuming, those of the folder.
        fabric: devices, precision and processes.
        folder: the folder of the run, which has been started.
        display: where progress is shown.
        resume: continue from the folder's checkpoint, if it has one.
        repeats: recorded runs that the settings come from.

    Returns:
        The last line of metrics.

    Raises:
        RunError: NaN, a damaged checkpoint, a disk that is full.
        DataError: the data set is not available.
        UsageError: the images differ from those of the run that is resumed or repeated.
    """
    try:
        with fabric.rank_zero_first():  # one process fetches
            splits = load_dataset(
                config.data,
                config.data_root,
                subset=config.subset,
                test_subset=config.test_subset,
                image_size=config.image_size,
                holdout=config.holdout,
            )
        data = {"name": config.data, "sha256": splits.digest}
        for run in [folder] if resume else repeats:
            check_same_data(run, data)
        state = None
        if resume and folder.check(CHECKPOINT).exists():
            before = run_data(folder.path, config)
            check_same_images(before, splits.info, "num_train", "num_test", "shape")
            state = load_checkpoint(folder)
        elif is_first_process():
            own = {IMAGES: asdict(splits.info)} if splits.info.classes else {}
            found = {ENVIRONMENT: {**folder.read_environment(), "data": data}, **own}
            folder.write({name: dump_page(content) for name, content in found.items()})
        training = Training(config, fabric, splits, state)
        try:
            _run_epochs(training, folder, display)
        except (TypeError, ValueError) as error:
            if isinstance(error, SelectConvError) and not isinstance(error, BadType | BadValue):
                raise
            # By now the settings have been accepted: this is not the user's mistake.
            raise RunError(f"the training failed: {error}") from error
    except RuntimeError as error:
        if fabric.world_size > 1 and _LOST_RANK.search(str(error)):
            raise RunError(
                "another process of this run has died: start all of them again with --resume."
            ) from error
        raise
    return folder.read(METRICS)[-1]


def _run_epochs(training: Training, folder: RunFolder, display: Display) -> None:
    if is_first_process():
        folder.cut_after(training.next_epoch - 1)
        folder.set_status("running")
    events = folder / TENSORBOARD / f"events.out.tfevents.{time.time_ns()}"
    for epoch in range(training.next_epoch, training.config.epochs):
        row, report = training.run_epoch(epoch, display)
        if is_first_process():
            _save_epoch(training, folder, row, report)
            add_events(events, row)
        display.epoch_done(row, report)
    if training.config.holdout:
        info, config, fabric = training.splits.info, training.config, training.fabric
        loaders = [load_part(part, info, config, fabric) for part in training.splits.holdout]
        result = evaluate(training.wrapped, loaders, fabric, display, config.epochs - 1)
        folder.write({HOLDOUT: (json.dumps(result) + "\n").encode()})
    folder.set_status("done")
    training.fabric.barrier()  # nobody reads the folder before it is complete


def _save_epoch(
    training: Training, folder: RunFolder, row: dict[str, Any], report: AllocationReport
) -> None:
    """Write what an epoch leaves; the checkpoint last: without it, the epoch is run again."""
    contents = {METRICS: dump_lines([*folder.read(METRICS), row])}
    if report:
        contents[ALLOCATION] = dump_lines([*folder.read(ALLOCATION), report.to_dict()])
    contents[LAST] = dump_weights(training.model)
    if row["test_error"] is not None and row["test_error"] < training.best_error:
        training.best_error = row["test_error"]
        contents[BEST] = contents[LAST]
    if (folder / CHECKPOINT).exists():
        contents[PREVIOUS] = (folder / CHECKPOINT).read_bytes()
    contents[CHECKPOINT] = dump_checkpoint(training.state(row["epoch"]))
    folder.write(contents)


def add_events(path: Path, row: Mapping[str, Any]) -> None:
    """Add an epoch's metrics to a file for TensorBoard; None is left out.

    torch's SummaryWriter writes in a thread of its own, which prints a traceback when the disk is
    full.

    Raises:
        RunError: it cannot be written.
    """
    values = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in row.items()
        if value is not None
    ]
    event = Event(step=row["epoch"], wall_time=time.time(), summary=Summary(value=values))
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            RecordWriter(file).write(event.SerializeToString())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}.") from error
