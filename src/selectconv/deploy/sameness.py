"""Whether two networks compute the same, up to rounding: compared before anything is returned."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from selectconv.checks import warn
from selectconv.graph.example import evaluating

_ROUNDINGS = 8  # what the other order of its sums may cost a network


def check_same(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    wanted: list[Tensor],
    got: list[Tensor],
    *,
    rtol: float,
    what: str,
    error: type[Exception],
) -> None:
    """Compare outputs with those of a model; warn where no more than rounding makes them differ.

    Args:
        model: the model.
        arguments: with which it was called, by place and by name.
        wanted: the model's outputs.
        got: those to compare with them.
        rtol: the relative difference that is accepted; more is in float16 and bfloat16.
        what: says what `got` are, and ends the sentence "output 0 ...".
        error: is raised where they differ.
    """
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        difference = largest_difference(one, other)
        is_float = one.is_floating_point()
        most = max(rtol, _ROUNDINGS * torch.finfo(one.dtype).eps) if is_float else rtol
        if difference <= most:
            continue
        words = f"output {number} {what} by {difference:.1e} of its size, more than {most:g}"
        if not _is_rounding(model, arguments, number, one, other):
            raise error(f"{words}. Nothing was returned or written.")
        warn(f"{words}. It differs as much from float64: the network magnifies rounding errors.")


def largest_difference(want: Tensor, got: Tensor) -> float:
    """Return the largest difference, relative to the largest value that is wanted."""
    if want.shape != got.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    want, got = want.cpu().double(), got.cpu().double()  # MPS has no float64
    differences = torch.where(want == got, 0.0, want - got).abs()  # infinities may be equal
    worst = differences.max() / torch.where(want.isfinite(), want, 0.0).abs().max().clamp(min=1e-12)
    return float(worst) if not torch.isnan(worst) else float("inf")


def tensors_in(outputs: Any) -> list[Tensor]:
    """List the tensors among a model's outputs."""
    return [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]


def _is_rounding(
    model: nn.Module, arguments: tuple[Any, Any], number: int, wanted: Tensor, got: Tensor
) -> bool:
    """Return whether a model's output is about as far from that in float64 as `got` is."""

    def as_float64(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().cpu().double() if value.is_floating_point() else value.cpu()

    try:
        exact = copy.deepcopy(model).cpu().double()  # on the CPU: MPS has no float64
        args, kwargs = tree_map(as_float64, arguments)
        with torch.no_grad(), evaluating(exact):
            output = tensors_in(exact(*args, **kwargs))[number]
    except Exception:  # a model that cannot be copied, or that makes tensors of its own dtype
        return False
    return largest_difference(output, got) <= _ROUNDINGS * largest_difference(output, wanted)
