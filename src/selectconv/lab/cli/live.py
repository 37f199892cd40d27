"""The runs of `reproduce` in one live view: how far each is, and the time left."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.progress import RunProgress, read_progress, seconds_left
from selectconv.lab.train.estimate import describe_duration

_EVERY_S = 1.0


class LiveRuns:
    """A table of the runs that are under way; nothing is shown where there is no terminal.

    Args:
        runs: what is left to do.
        out: folder of the grid.
        jobs: runs at a time.
        console: where it is shown.
    """

    def __init__(self, runs: Sequence[PlannedRun], out: Path, jobs: int, console: Console) -> None:
        self._runs, self._out, self._jobs = runs, out, jobs
        self._shown_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._is_shown = console.is_terminal

    def __enter__(self) -> "LiveRuns":
        if self._is_shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def watch(self, running: Sequence[PlannedRun]) -> None:
        """Show the runs that are under way, at most once a second."""
        now = time.monotonic()
        if not self._is_shown or now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        progress = [read_progress(run, self._out) for run in self._runs]
        names = {run.name for run in running}
        self._live.update(draw_runs(progress, names, self._jobs), refresh=True)


def draw_runs(progress: Sequence[RunProgress], running: set[str], jobs: int) -> Table:
    """Draw one line for each run that is under way, and one for all."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("run", "", "epochs", "test error"):
        table.add_column(head)
    for run in progress:
        if run.name in running:
            error = "-" if run.error is None else f"{run.error:.2f} %"
            bar = ProgressBar(total=run.epochs, completed=run.done, width=24)
            table.add_row(run.name, bar, f"{run.done}/{run.epochs}", error)
    total, done = sum(run.epochs for run in progress), sum(run.done for run in progress)
    left = seconds_left(progress, jobs)
    words = "time left: not known yet" if left is None else f"about {describe_duration(left)} left"
    ended = sum(run.done >= run.epochs for run in progress)
    table.add_row(
        f"{ended} of {len(progress)} runs done",
        ProgressBar(total=total, completed=done, width=24),
        f"{done}/{total}",
        words,
    )
    return table
