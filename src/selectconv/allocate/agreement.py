"""How processes agree on an allocation: rank 0 decides; every rank gets its decision or error."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from selectconv.errors import AllocationError


def in_process_group() -> bool:
    """Return whether there are other processes to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(decide: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Let rank 0 decide, and give every rank its decision, as JSON keeps it.

    Args:
        decide: called on rank 0 only.
        device: of the model, for backends that send from there.

    Raises:
        AllocationError: rank 0 could not decide; there its own error is raised.
    """
    message = b""
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            content = decide()
        except Exception as error:  # whatever it is, the other ranks wait for a message
            failed = error
            content = {"error": str(error)}
        message = json.dumps(content).encode()
    device = _message_device(device)
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, src=0)
    letters = torch.empty(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        letters.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(letters, src=0)
    if failed is not None:
        raise failed
    heard: dict[str, Any] = json.loads(bytes(letters.cpu().numpy()))
    if "error" in heard:
        raise AllocationError(f"rank 0: {heard['error']}")
    return heard


def broadcast_tensors(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Give every rank the values that rank 0 has in these tensors, in place."""
    # Not a set: the order must be the same in every process.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same]).to(_message_device(device))
        sent = flat.to(torch.uint8) if dtype == torch.bool else flat
        dist.broadcast(sent, src=0)
        parts = sent.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _message_device(device: torch.device) -> torch.device:
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
