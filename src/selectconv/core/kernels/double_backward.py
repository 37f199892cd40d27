"""A derivative of a kernel's derivative: through the definition in torch's own operations."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
