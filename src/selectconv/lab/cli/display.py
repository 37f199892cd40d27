"""How a run shows its progress: a bar in a terminal, and one line per epoch everywhere."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from selectconv.allocate.report import AllocationReport
from selectconv.lab.data.serve.batches import Loader
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.evaluation import Batches

_HEAD = "epoch   train loss   test loss   test error   images/s   de-/re-allocated   moved   closed"


class Lines:
    """One line per epoch, nothing in between."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self._has_head = False

    def batches(self, loader: Loader, epoch: int, what: str) -> Batches:
        """Pass the batches through."""
        return loader.epoch(epoch)

    def close(self) -> None:
        """Leave nothing behind on the screen."""

    def epoch_done(self, row: dict[str, Any], report: AllocationReport) -> None:
        """Print the epoch's line."""
        if not self._has_head:
            if row["epoch"]:
                self.console.print(f"resumed at epoch {row['epoch']}", highlight=False)
            self.console.print(_HEAD, style="bold", highlight=False)
            self._has_head = True
        closed = sum(map(len, report.deallocated.values()))
        opened = sum(map(len, report.reallocated.values()))
        self.console.print(
            f"{row['epoch']:5d} {row['train_loss']:12.4f} {_tested(row)}"
            f" {row['images_per_second']:10.0f}"
            f" {closed:9d} / {opened:<6d} {row['moved']:6d} {row['closed']:8d}",
            highlight=False,
        )


def _tested(row: dict[str, Any]) -> str:
    if row["test_error"] is None:  # no test images
        return f"{'-':>11s} {'-':>12s}"
    return f"{row['test_loss']:11.4f} {row['test_error']:10.2f} %"


class Bars(Lines):
    """A bar over the whole training with the remaining time, and one line per epoch."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        super().__init__(config, console)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, time left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def batches(self, loader: Loader, epoch: int, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass the batches through and move the bar."""
        if what == "train":
            if self._task is None:
                total = self.config.epochs * len(loader)
                self._task = self.progress.add_task("", total=total)
                self.progress.start()
            self.progress.update(self._task, completed=epoch * len(loader))
        if self._task is not None:
            self.progress.update(self._task, description=f"epoch {epoch}, {what}")
        for batch in loader.epoch(epoch):
            yield batch
            if what == "train":
                self.progress.advance(self._task)

    def close(self) -> None:
        """Take the bar away, however the training ended."""
        self.progress.stop()


def choose_display(config: TrainConfig, console: Console) -> Lines:
    """Choose bars for a terminal, lines for everything else."""
    return (
        Bars(config, console)
        if console.is_terminal and not console.quiet
        else Lines(config, console)
    )
