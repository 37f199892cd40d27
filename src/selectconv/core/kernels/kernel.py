"""What a kernel is, and how autograd sees it: one operation with a hand-written backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

Reroute = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
NormReroute = Callable[[_BatchNorm, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Kernel:
    """A fast path of SelectChannel.

    Attributes:
        can_run: whether it serves an input (N, C, ...), a plain tensor with values.
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


class Operation(NamedTuple):
    """What `Differentiable` runs, on tensors of which some may be None.

    Attributes:
        run: computes the output.
        differentiate: computes, from the output's gradient, whether each tensor's gradient is
            needed, and the tensors, the gradients of the first few of them.
        define: computes the output in torch's operations.
    """

    run: Callable[..., Tensor]
    differentiate: Callable[..., Grads]
    define: Callable[..., Tensor]


class _Differentiable(torch.autograd.Function):
    """An operation of a kernel. Second derivatives are those of the definition."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor | None) -> Tensor:
        ctx.operation = operation
        ctx.save_for_backward(*tensors)
        return operation.run(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks a tensor only once
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a derivative of this derivative is wanted
            wanted = [x for x, is_needed in zip(tensors, needed, strict=True) if is_needed]
            out = ctx.operation.define(*tensors)
            found = iter(
                torch.autograd.grad(
                    out, wanted, grad, create_graph=True, allow_unused=True, materialize_grads=True
                )
            )
            return None, *(next(found) if is_needed else None for is_needed in needed)
        grads = ctx.operation.differentiate(grad, needed, *tensors)
        return None, *grads, *[None] * (len(tensors) - len(grads))


def differentiable(operation: Operation, *tensors: Tensor | None) -> Tensor:
    """Run an operation so that autograd sees it."""
    return _Differentiable.apply(operation, *tensors)  # type: ignore[no-any-return, no-untyped-call]
