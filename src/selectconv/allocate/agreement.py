"""How processes agree on an allocation: rank 0 decides; every rank gets its decision or error."""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from selectconv.core.plan import AllocationPlan
from selectconv.errors import AllocationError


class Decided(NamedTuple):
    """What was decided: a plan, and the state of the random numbers after it."""

    plan: AllocationPlan
    generator: Tensor


def in_process_group() -> bool:
    """Return whether there are other processes to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(decide: Callable[[], Decided], device: torch.device) -> Decided:
    """Let rank 0 decide, and give every rank its decision.

    Args:
        decide: called on rank 0 only.
        device: of the model, for backends that send from there.

    Raises:
        AllocationError: rank 0 could not decide; there its own error is raised.
    """
    if not in_process_group():
        return decide()
    message = b""
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            plan, generator = decide()
            content = {"plan": plan.to_dict(), "generator": generator.tolist()}
        except Exception as error:  # whatever it is, the other ranks wait for a message
            failed = error
            content = {"error": str(error)}
        message = json.dumps(content).encode()
    size = torch.tensor([len(message)], device="cpu")
    broadcast_tensors([size], device)
    letters = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
    if message:
        letters = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    broadcast_tensors([letters], device)
    if failed is not None:
        raise failed
    heard = json.loads(bytes(letters.numpy()))
    if "error" in heard:
        raise AllocationError(f"rank 0: {heard['error']}")
    generator = torch.tensor(heard["generator"], dtype=torch.uint8, device="cpu")
    return Decided(AllocationPlan.from_dict(heard["plan"]), generator)


def broadcast_tensors(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Give every rank the values that rank 0 has in these tensors, in place."""
    carrier = device if dist.get_backend() == "nccl" else torch.device("cpu")
    # Not a set: the order must be the same in every process.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same]).to(carrier)
        sent = flat.to(torch.uint8) if dtype == torch.bool else flat
        dist.broadcast(sent, src=0)
        parts = sent.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
