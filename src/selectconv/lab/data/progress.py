"""A progress bar on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    title: str, total: int | None, *, of_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, on terminals; the block gets the function to advance it.

    Args:
        title: the text to the left of the bar.
        total: where it ends; None: unknown.
        of_bytes: bytes rather than pieces.
    """
    from rich import progress  # not before it is needed: it takes a while to import
    from rich.console import Console

    console = Console(stderr=True)
    amount = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        amount,
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, advance=step)
