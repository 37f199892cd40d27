"""Fast paths of SelectChannel: C on the CPU, Triton on CUDA; `core.shift` is the definition.

None of them is needed: where no kernel runs, the layers compute the definition with torch's own
operations. A kernel is a module with a `Kernel`; another one is another entry of `KERNELS`.
"""

import torch
from torch import Tensor

from selectconv.core.kernels import cpu, triton_select
from selectconv.core.kernels.kernel import (
    Kernel,
    Reroute,
    is_simple,
    is_watched,
    may_run,
    simple_path,
)

__all__ = [
    "KERNELS",
    "Kernel",
    "Reroute",
    "describe_path",
    "find_kernel",
    "is_watched",
    "simple_path",
]

KERNELS = (triton_select.KERNEL, cpu.KERNEL)


def find_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel that serves an input (N, C, ...); None: compute the definition."""
    if may_run(x):
        for kernel in KERNELS:  # in every forward: a generator would take longer
            if kernel.can_run(x):
                return kernel
    return None


def describe_path(device: torch.device) -> str:
    """Say in one line which path selective layers take on a device in eager mode, and why."""
    if is_simple():
        return "torch's operations: simple_path() is on"
    reason = f"no kernel for {device.type}"
    for kernel in KERNELS:
        obstacle = kernel.find_obstacle(device)
        if obstacle is None:
            return kernel.describe()
        reason = obstacle or reason
    return f"torch's operations: {reason}"
