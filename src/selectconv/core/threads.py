"""Another number of threads for a moment; one, where operations are too short to be shared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads on the CPU, and as many as before afterwards.

    Where other processes use the cores, threads that wait for each other after every short
    operation take many times as long as one thread does.

    Example:
        >>> with num_threads(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    if before != count:  # setting it takes long
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
