"""Another number of threads for a moment; one, where operations are too short to be shared."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Let torch use this many threads on the CPU, and as many as before afterwards."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Let torch use one thread on the CPU.

    Where other processes use the cores, threads that wait for each other after every short
    operation take many times as long as one thread does.

    Example:
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    return using(1)
