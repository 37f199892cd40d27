"""Steps of a traced model that only move channels about: split, shuffle, slice, repeat.

Which channel ends up where is not reasoned out but tried: the steps are run on a small tensor whose
every value is the number of its channel.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from selectconv.graph.operations import IN_PLACE_OPERATORS, Family, family_of
from selectconv.graph.tracer import module_of

# How sizes are worked out.
_ARITHMETIC = (
    operator.floordiv, operator.mul, operator.add, operator.sub, operator.neg, *IN_PLACE_OPERATORS
)  # fmt: skip
# A probe's images and pixels: even, and different from one another along every axis.
_PROBE_IMAGES, _PROBE_PIXELS = 3, (4, 6, 8)


def is_rearrangement(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step may do no more than move channels about."""
    return family_of(node, module) in (Family.REARRANGE, Family.CONTIGUOUS)


def moved_channels(
    start: fx.Node,
    end: fx.Node,
    num_channels: int,
    axes: int,
    modules: Mapping[str, nn.Module],
) -> Tensor | None:
    """Find the channel of `start` that each channel of `end` holds, (K,) int64.

    Args:
        start: a step whose output has `num_channels` channels and `axes` spatial axes.
        end: what rearrangements make of it.
        num_channels: the channels of `start`.
        axes: its spatial axes.
        modules: the model's, by name.

    Returns:
        The channels; None where `end` mixes channels, or depends on other things.
    """
    pixels = [1] * axes
    channels = torch.arange(num_channels, dtype=torch.float64).view(1, -1, *pixels)
    probe = channels.expand(_PROBE_IMAGES, -1, *_PROBE_PIXELS[:axes]).contiguous()
    try:
        moved = _compute(end, {start: probe}, modules)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None  # sizes that the probe does not have, or that other tensors give
    if not isinstance(moved, Tensor) or moved.ndim != axes + 2 or moved.numel() == 0:
        return None
    index = moved[0].flatten(1)[:, 0]
    if not torch.equal(index.view(1, -1, *pixels).expand_as(moved), moved):
        return None
    return index.to(torch.int64)


def _compute(node: fx.Node, known: dict[fx.Node, Any], modules: Mapping[str, nn.Module]) -> Any:
    """Compute a step from known ones; only rearrangements and sizes are computed."""
    if node in known:
        return known[node]
    module = module_of(modules, node)
    is_size = (node.op == "call_method" and node.target == "size") or (
        node.op == "call_function"
        and (node.target in _ARITHMETIC or (node.target is getattr and node.args[1] == "shape"))
    )
    if not (is_size or is_rearrangement(node, module)):
        raise ValueError(f"`{node}` is no rearrangement")
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda other: _compute(other, known, modules)
    )
    call: Any = module or node.target
    if node.op == "call_method":
        call, args = getattr(args[0], str(node.target)), args[1:]
    known[node] = call(*args, **kwargs)
    return known[node]
