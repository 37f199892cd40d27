"""Section 2.3 for one layer: decide which slots to close and what to re-open, then do it."""

from dataclasses import replace

import torch
from torch import Tensor

from selectconv.core.allocation import ReallocRule, plan_reopening, realloc_scores
from selectconv.core.ecdm import normalize_ecdm
from selectconv.core.plan import LayerPlan
from selectconv.core.slots import SlottedConv, draw_weights, write_slots


def plan_layer(
    layer: SlottedConv,
    necdm: Tensor,
    closed: Tensor,
    rule: ReallocRule | None,
    generator: torch.Generator | None,
) -> LayerPlan:
    """Plan to close slots and, with a rule, to re-open all that are closed then.

    Args:
        layer: the layer, which is not changed.
        necdm: (I, O), which is written into.
        closed: the slots to close.
        rule: how to re-open. None: re-open nothing.
        generator: a CPU generator. None: torch's global one.
    """
    closed = closed.to(layer.gate.device)
    gate = layer.gate.index_fill(0, closed, False)
    if rule is None or bool(gate.all()):
        return LayerPlan(closed=closed.cpu())
    necdm = normalize_ecdm(necdm.index_fill_(0, closed, 0.0))
    scores = realloc_scores(necdm, layer.index, gate, rule.max_copies, rule.norm)
    axes, on_cpu = len(layer.kernel_size), (scores.cpu(), layer.index.cpu(), gate.cpu())
    return replace(plan_reopening(*on_cpu, axes, rule, generator), closed=closed.cpu())


@torch.no_grad()
def carry_out(layer: SlottedConv, plan: LayerPlan) -> None:
    """Close slots, then re-open slots with weights and shifts of their own; checks nothing."""
    weight, drawn = layer.weight, None
    if plan.weight_seed is not None:  # before anything changes: a seed may be refused
        drawn = draw_weights(layer, len(plan.opened), plan.weight_seed)
    layer.gate.index_fill_(0, plan.closed.to(weight.device), False)
    if len(plan.opened) == 0 or layer.shift is None:
        return
    opened = plan.opened.to(weight.device)
    layer.gate.index_fill_(0, opened, True)
    layer.moved.index_fill_(0, opened, True)
    layer.shifted.index_fill_(0, opened, plan.shift is not None)
    layer.index.index_copy_(0, opened, plan.source.to(weight.device))
    if plan.shift is None:
        layer.shift.index_fill_(0, opened, 0.0)
    else:
        layer.shift.index_copy_(0, opened, plan.shift.to(layer.shift))
    if drawn is None:
        zero_slots(weight, layer.groups, opened)
    else:
        write_slots(weight, layer.groups, opened, drawn.to(weight))


def zero_slots(tensor: Tensor, groups: int, slots: Tensor) -> None:
    """Zero in place what belongs to `slots` in a tensor laid out as a weight or a shift."""
    slots = slots.to(tensor.device)
    if tensor.ndim <= 2:  # one row per slot; weights have at least three axes
        tensor.index_fill_(0, slots, 0)
    elif groups == 1:
        tensor.index_fill_(1, slots, 0)  # many times faster than what follows
    else:
        write_slots(tensor, groups, slots, 0.0)
