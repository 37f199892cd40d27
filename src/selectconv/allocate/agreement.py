"""How processes agree: rank 0 decides, and every rank gets its decision or its error."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from selectconv.errors import AllocationError

Value = TypeVar("Value")


def in_process_group() -> bool:
    """Return whether there are other processes to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(decide: Callable[[], Value], device: torch.device) -> Value:
    """Let rank 0 decide, and give every rank the value.

    Args:
        decide: called on rank 0 only; what it returns holds tensors of the CPU only.
        device: of the model, for backends that send from there.

    Raises:
        AllocationError: rank 0 could not decide; there its own error is raised.
    """
    if not in_process_group():
        return decide()
    message: list[Any] = [None, None]  # the value, or what went wrong
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message[0] = decide()
        except Exception as error:  # whatever it is, the other ranks wait for a message
            failed = error
            message[1] = f"rank 0: {error}"
    carrier = device if dist.get_backend() == "nccl" else torch.device("cpu")
    dist.broadcast_object_list(message, src=0, device=carrier)
    value, wrong = message
    if wrong is not None:
        raise failed or AllocationError(wrong)
    return value  # type: ignore[no-any-return]
