"""Which path runs: the kernels, or the definition in torch's own operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_is_simple = False


@contextmanager
def simple_path() -> Iterator[None]:
    """Compute by the definition, without kernels, for as long as the block lasts.

    Example:
        >>> with simple_path():
        ...     is_simple()
        True
    """
    global _is_simple
    before, _is_simple = _is_simple, True
    try:
        yield
    finally:
        _is_simple = before


def is_simple() -> bool:
    """Return whether a `simple_path` block is running."""
    return _is_simple


def is_watched() -> bool:
    """Return whether someone must see torch's individual operations, which a kernel would hide.

    Compilers, tracers, dispatch modes, functorch and forward-mode derivatives do.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
