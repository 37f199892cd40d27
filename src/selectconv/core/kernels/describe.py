"""Which path selective layers take on a device, in words."""

import torch

from selectconv.core.kernels.build import load_kernel
from selectconv.core.kernels.switch import is_simple
from selectconv.core.kernels.triton_select import find_obstacle


def describe_path(device: torch.device) -> str:
    """Say in a line which path selective layers take on a device in eager mode, and why."""
    if is_simple():
        return "torch's operations: simple_path() is on"
    if device.type == "cpu":
        kernel = load_kernel()
        if kernel.library is not None:
            return kernel.about
        return f"torch's operations: {kernel.about}"
    obstacle = find_obstacle(device)
    return "Triton kernel" if obstacle is None else f"torch's operations: {obstacle}"
