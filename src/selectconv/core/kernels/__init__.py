"""Fast paths of SelectChannel: C on the CPU, Triton on CUDA; `core.shift` is the definition.

None of them is needed: where no kernel runs, the layers compute the definition with torch's own
operations. A kernel is a module that is a `Kernel`; another one is another entry of `KERNELS`.
"""

from typing import Protocol

import torch
from torch import Tensor

from selectconv.core.kernels import cpu, triton_select
from selectconv.core.kernels.switch import is_simple, is_watched, simple_path

__all__ = ["KERNELS", "Kernel", "cpu", "describe_path", "find_kernel", "is_watched", "simple_path"]


class Kernel(Protocol):
    """What a kernel's module has."""

    @property
    def READS_ALLOCATION(self) -> bool:
        """Whether the layer may read the allocation's values, to leave out closed slots."""

    def can_run(self, x: Tensor) -> bool:
        """Return whether the kernel serves this input (N, C, ...), here and now."""

    def find_obstacle(self, device: torch.device) -> str | None:
        """Say in a few words why there is no such kernel for a device; None: there is one."""

    def describe(self) -> str:
        """Name the kernel, for people."""

    def reroute(
        self, x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None
    ) -> Tensor:
        """Compute `core.shift.reroute`, without checks: (N, len(index), ...)."""


KERNELS: tuple[Kernel, ...] = (triton_select, cpu)


def find_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel that serves an input; None: compute the definition."""
    for kernel in KERNELS:  # in every forward: a generator would take longer
        if kernel.can_run(x):
            return kernel
    return None


def describe_path(device: torch.device) -> str:
    """Say in one line which path selective layers take on a device in eager mode, and why."""
    if is_simple():
        return "torch's operations: simple_path() is on"
    obstacles = [kernel.find_obstacle(device) for kernel in KERNELS]
    for kernel, obstacle in zip(KERNELS, obstacles, strict=True):
        if obstacle is None:
            return kernel.describe()
    # The kernel for this kind of device says more than one for another kind.
    own = cpu if device.type == "cpu" else triton_select
    return f"torch's operations: {own.find_obstacle(device)}"
