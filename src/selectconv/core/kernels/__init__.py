"""Fast paths of SelectChannel: C on the CPU, Triton on CUDA; `core.shift` is the definition.

None of them is needed: where no kernel runs, the layers compute the definition with torch's own
operations. A kernel is a module with a `Kernel`; another one is another entry of `KERNELS`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from selectconv.core.kernels import cpu, triton_select
from selectconv.core.kernels.kernel import Kernel as Kernel

KERNELS = (triton_select.KERNEL, cpu.KERNEL)
_is_simple = False


@contextmanager
def simple_path() -> Iterator[None]:
    """Compute by the definition, without kernels, for as long as the block lasts.

    Example:
        >>> with simple_path():
        ...     describe_path(torch.device("cpu"))
        "torch's operations: simple_path() is on"
    """
    global _is_simple
    before, _is_simple = _is_simple, True
    try:
        yield
    finally:
        _is_simple = before


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


def find_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel that serves an input (N, C, ...); None: compute the definition."""
    if type(x) not in (Tensor, torch.nn.Parameter) or _is_simple or is_watched() or not x.numel():
        return None
    for kernel in KERNELS:  # in every forward: a generator would take longer
        if kernel.can_run(x):
            return kernel
    return None


def describe_path(device: torch.device) -> str:
    """Say in one line which path selective layers take on a device in eager mode, and why."""
    if _is_simple:
        return "torch's operations: simple_path() is on"
    reason = f"no kernel for {device.type}"
    for kernel in KERNELS:
        obstacle = kernel.find_obstacle(device)
        if obstacle is None:
            return kernel.describe()
        reason = obstacle or reason
    return f"torch's operations: {reason}"
