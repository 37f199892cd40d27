"""A progress bar on stderr, where the package for it is installed."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    title: str, total: int | None, *, of_bytes: bool, stays: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; the block gets the function that advances it.

    Without rich (the `train` extra) nothing is shown: a missing bar is no reason to fail. Nor is
    a bar that does not stay where stderr is no terminal: a log would get an empty line.

    Args:
        title: the text to the left of the bar.
        total: where it ends; None: unknown.
        of_bytes: bytes rather than pieces.
        stays: whether it can still be seen after the block.
    """
    if importlib.util.find_spec("rich") is None:
        yield lambda amount: None
        return
    progress = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    if not stays and not console.is_terminal:
        yield lambda amount: None
        return
    amount = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        amount,
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=not stays) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, advance=step)
