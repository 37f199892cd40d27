"""What a kernel is, when none may run, and how its derivative is differentiated again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

Reroute = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
NormReroute = Callable[[_BatchNorm, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A fast path of SelectChannel.

    Attributes:
        can_run: whether it serves an input (N, C, ...) that `may_run` accepts.
        find_obstacle: why it cannot serve a device, in a few words; "": it is meant for other
            devices; None: it serves it.
        describe: names the kernel, for people.
        reroute: computes `core.shift.reroute`, without checks: (N, len(index), ...).
        reads_allocation: whether a layer may read the allocation's values, to leave out closed
            slots.
        norm_relu_reroute: computes `reroute(relu(norm(x)), ...)` in one pass, and updates the
            norm's statistics; None: it cannot.
        moments: computes mean and biased variance of each channel; None: it cannot.
    """

    can_run: Callable[[Tensor], bool]
    find_obstacle: Callable[[torch.device], str | None]
    describe: Callable[[], str]
    reroute: Reroute
    reads_allocation: bool
    norm_relu_reroute: NormReroute | None = None
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


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


def may_run(x: Tensor) -> bool:
    """Return whether any kernel may run on `x`, which must be a plain tensor with values."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not _is_simple
        and not is_watched()
        and x.numel() > 0
    )


def differentiable_grads(
    out: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of `out`, the definition's output, which can be differentiated again.

    Args:
        out: computed from the inputs in torch's operations.
        inputs: those that have a derivative.
        needed: whether each input's gradient is wanted; None is returned for the others.
        grad: the gradient of `out`.
    """
    wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed and x is not None]
    grads = iter(
        torch.autograd.grad(
            out, wanted, grad, create_graph=True, allow_unused=True, materialize_grads=True
        )
    )
    return [next(grads) if is_needed else None for is_needed in needed]
