"""How a run shows its progress: a bar in a terminal, and one line per epoch everywhere."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selectconv.allocate.report import AllocationReport
from selectconv.lab.data.loaders import Batch, Loader
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.loop import Display

_HEAD = "epoch   train loss   test loss   test error   images/s   de-/re-allocated   moved   closed"


def build_bar(console: Console, unit: str) -> Progress:
    """Build a bar with the time left, which shows nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}, time left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
        disable=console.quiet or not console.is_terminal,
    )


class RunDisplay(Display):
    """A bar over the whole training, and one line per epoch.

    Args:
        config: the run's settings.
        console: where it is shown.
    """

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.bar = build_bar(console, "steps")
        self._task = self.bar.add_task("", total=None)
        self._has_head = False

    def batches(self, loader: Loader, epoch: int, what: str) -> Iterable[Batch]:
        """Pass the batches through and move the bar."""
        self.bar.update(self._task, description=f"epoch {epoch}, {what}")
        if what == "train":
            size = len(loader)
            self.bar.update(self._task, total=self.config.epochs * size, completed=epoch * size)
        for batch in loader.epoch(epoch):
            yield batch
            if what == "train":
                self.bar.advance(self._task)

    def epoch_done(self, row: dict[str, Any], report: AllocationReport) -> None:
        """Print the epoch's line."""
        if not self._has_head:
            self._has_head = True
            if row["epoch"]:
                self.console.print(f"resumed at epoch {row['epoch']}", highlight=False)
            self.console.print(_HEAD, style="bold", highlight=False)
        tested = f"{'-':>11s} {'-':>12s}"  # no test images
        if row["test_error"] is not None:
            tested = f"{row['test_loss']:11.4f} {row['test_error']:10.2f} %"
        closed = sum(map(len, report.deallocated.values()))
        opened = sum(map(len, report.reallocated.values()))
        self.console.print(
            f"{row['epoch']:5d} {row['train_loss']:12.4f} {tested}"
            f" {row['images_per_second']:10.0f}"
            f" {closed:9d} / {opened:<6d} {row['moved']:6d} {row['closed']:8d}",
            highlight=False,
        )
