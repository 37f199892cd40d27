"""Which channels a compressed model keeps, and where it gathers some of them.

From the outputs back, a channel is needed if someone needs what is computed from it: closed slots
read nothing. From the inputs on, each value then keeps what is needed of it, and a reader that
wants less than its input keeps gathers its share. Counting and compressing read the same plan.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from selectconv.core.layer import SelectConvNd
from selectconv.deploy.parts import (
    MACS_PER_PASS,
    Blocks,
    Channels,
    Part,
    narrow,
    open_shifts,
    plan_parts,
)
from selectconv.graph.channels import Mask, by_output, channel_operands, is_zero, zero_channels
from selectconv.graph.dataflow import (
    JOINING,
    Dataflow,
    Kind,
    Operation,
    find_shared,
    is_channel_operand,
    joined,
)
from selectconv.graph.operations import argument

BY_CHANNEL = (Kind.NORM, Kind.CHANNELWISE)  # what they keep, their inputs are brought to


@dataclass
class Layout:
    """What a compressed model keeps of each value.

    Attributes:
        kept: by node, the channels that its output keeps, in order; nodes that nobody needs are
            missing.
        pieces: by operation that joins channels, those of its inputs that are left.
        parts: by conv, what the plain conv reads that replaces it.
    """

    kept: dict[fx.Node, Channels] = field(default_factory=dict)
    pieces: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    parts: dict[fx.Node, list[Part]] = field(default_factory=dict)


def plan_layout(
    flow: Dataflow,
    round_to: int | None = None,
    unread: Mapping[fx.Node, Mask] | None = None,
    *,
    is_exact: bool = False,
) -> Layout:
    """Decide what to keep of every value of a traced model, for its present allocation.

    Args:
        flow: the traced model.
        round_to: as for `compress`.
        unread: by layer that is not selective, the channels of its input that it does not read;
            by default, those that were closed by filters.
        is_exact: read nothing but what is needed, whether or not gathering it pays.
    """
    unread = find_unread(flow) if unread is None else unread
    planner = _Planner(flow, round_to, unread, is_exact=is_exact)
    for node in flow.operations:
        if node in planner.needed:
            planner.layout.kept[node] = planner.keep(flow.operations[node])
    return planner.layout


class _Planner:
    """Chooses what each operation keeps, in order."""

    def __init__(
        self,
        flow: Dataflow,
        round_to: int | None,
        unread: Mapping[fx.Node, Mask],
        *,
        is_exact: bool,
    ) -> None:
        self.flow, self.is_exact = flow, is_exact
        self.shared = find_shared(flow)
        self.blocks = Blocks(round_to, sum(one.numel() for one in flow.root.parameters()))
        self.needed = _find_needed(flow, self.shared, self.blocks, unread)
        exact = _find_needed(flow, self.shared, replace(self.blocks, round_to=1), unread)
        # Where all readers of a value read the same of it, none gathers.
        self.gathers = any(
            open_shifts(op.module).any() or not np.array_equal(mask, exact[before])
            for node, op in flow.operations.items()
            if op.kind in (Kind.CONV, *BY_CHANNEL) and node in exact
            for before, mask in reads(flow, op, exact[node], unread)
        )
        self.costs = _channel_costs(flow, self.needed)
        self.round_to = round_to or 1
        self.layout = Layout()

    def keep(self, op: Operation) -> Channels:
        """Choose the channels of an operation's output, and what it reads."""
        need, kept = self.needed[op.node], self.layout.kept
        if op.kind in (Kind.CONV, Kind.TRANSPOSED, Kind.LINEAR):
            filters = _keep_filters(op, need, self.round_to)
            if op.kind is Kind.CONV and isinstance(op.module, _ConvNd):
                before = argument(op.node)
                # A conv that is called twice must read the same number of channels each time.
                round_to = None if self.is_exact or op.node in self.shared else self.round_to
                self.layout.parts[op.node] = plan_parts(
                    op.module, filters, kept[before], self.flow.operations[before].shape[2:],
                    round_to, self.blocks.of_shifts(op.module), self.gathers,
                )  # fmt: skip
            return filters
        if op.kind in BY_CHANNEL:
            return self._keep_channels(op, need)
        if op.kind in JOINING:
            # Nothing is gathered here: the readers of what is joined gather in any case.
            pieces, is_kept = _pieces(self.flow, op, need), need.copy()
            for other, where, pixels in pieces:
                is_kept[where].reshape(-1, pixels)[kept[other]] = True
            self.layout.pieces[op.node] = [other for other, *_ in pieces]
            return np.flatnonzero(is_kept)
        return np.arange(op.channels)

    def _keep_channels(self, op: Operation, need: Mask) -> Channels:
        """Choose the channels of something that works channel by channel."""
        inputs = [self.layout.kept[other] for other in channel_operands(self.flow, op)]
        wanted = np.flatnonzero(need)
        if (
            not inputs
            or isinstance(op.module, nn.GroupNorm)  # only whole groups are wanted
            or self.is_exact
            or any(not np.array_equal(inputs[0], other) for other in inputs)
        ):
            return wanted  # one of them is gathered in any case
        saved = self.costs[op.node] / len(inputs) if self.gathers else 0.0
        return narrow(inputs[0], wanted, saved, self.round_to)


def _channel_costs(flow: Dataflow, needed: dict[fx.Node, Mask]) -> dict[fx.Node, float]:
    """Estimate what one more channel costs from each operation on, in passes over its elements."""
    costs: dict[fx.Node, float] = {}
    for node, op in reversed(flow.operations.items()):
        costs[node] = 1.0
        for user in node.users:
            after, size = flow.operations[user], math.prod(op.shape)
            if user not in needed or after.kind not in (Kind.CONV, *BY_CHANNEL):
                continue
            share = math.prod(after.shape) * op.channels / size / after.channels
            if isinstance(after.module, _ConvNd):
                filters = int(needed[user].sum()) / after.module.groups
                macs = filters * math.prod(after.module.kernel_size)
                costs[node] += share * macs / MACS_PER_PASS
            else:
                costs[node] += share * costs[user]
    return costs


def channel_axis(flow: Dataflow, op: Operation, other: fx.Node) -> int | None:
    """Return the axis of a parameter that lies along an operation's channels; None: none does."""
    shape = flow.operations[other].shape
    axis = len(shape) - len(op.shape) + 1
    return axis if axis >= 0 and shape[axis] == op.shape[1] > 1 else None


def is_read_for_type(tensor: fx.Node) -> bool:
    """Return whether nothing but the type of a tensor is read."""
    return all(
        user.target is getattr and user.args[1] in ("dtype", "device") for user in tensor.users
    )


def find_unread(flow: Dataflow) -> dict[fx.Node, Mask]:
    """Find the channels that were closed by filters in layers that are not selective.

    Such a layer has no gate. Its weights for the channel are zero, and so is the channel itself,
    which keeps them there.
    """
    zero, unread = zero_channels(flow, is_zero), {}
    for node, op in flow.operations.items():
        module = op.module
        if op.kind not in (Kind.CONV, Kind.TRANSPOSED, Kind.LINEAR) or module is None:
            continue
        mask = zero[argument(node)]
        if isinstance(module, SelectConvNd) or getattr(module, "groups", 1) > 1 or not mask.any():
            continue
        weight = by_output(module, cast(Tensor, module.weight).detach())
        is_used = weight.transpose(0, 1).flatten(1).any(dim=1)
        unread[node] = mask & ~is_used.cpu().numpy()
    return unread


def _find_needed(
    flow: Dataflow, shared: set[fx.Node], blocks: Blocks, unread: Mapping[fx.Node, Mask]
) -> dict[fx.Node, Mask]:
    """Go back from the output: which channels of each value somebody needs.

    Depthwise convs, and convs that join shifted channels to the others, are slow unless they read
    whole blocks of channels: some that nobody needs are kept for them.
    """
    needed: dict[fx.Node, Mask] = {}
    for node, op in reversed(flow.operations.items()):
        if op.kind is Kind.OUTPUT:
            needed[node] = np.ones(0, dtype=bool)
        if op.kind is Kind.INPUT and node not in needed:
            needed[node] = np.ones(op.channels, dtype=bool)  # the signature stays
        if node not in needed:
            continue
        need, conv = needed[node], op.module if op.kind is Kind.CONV else None
        if node in shared:  # called twice, with one set of weights: those must serve both
            need[:] = True
        if not need.any():  # only its shape is read, or by closed slots: a conv needs one input
            need[:1] = True
        if isinstance(op.module, nn.GroupNorm):
            by_group = need.reshape(op.module.num_groups, -1)
            by_group[by_group.any(axis=1)] = True
        if isinstance(conv, _ConvNd) and 1 < conv.groups == conv.in_channels:
            _round_up(need, blocks.of_depthwise(len(need)))
        for other, mask in reads(flow, op, need, unread):
            needed[other] = needed.get(other, False) | mask
            if isinstance(conv, _ConvNd) and open_shifts(conv).any():
                _round_up(needed[other], blocks.of_shifts(conv))
    return needed


def _round_up(need: Mask, block: int) -> None:
    """Mark more channels as needed, up to a multiple of `block` or all."""
    need[np.flatnonzero(~need)[: -int(need.sum()) % block]] = True


def reads(
    flow: Dataflow, op: Operation, need: Mask, unread: Mapping[fx.Node, Mask]
) -> Iterator[tuple[fx.Node, Mask]]:
    """Yield what an operation needs of each of its inputs, if `need` is needed of its output."""
    if op.kind is Kind.CONV and isinstance(op.module, _ConvNd) and op.node not in unread:
        yield argument(op.node), _conv_reads(op.module, need)
    elif op.node in unread:
        yield argument(op.node), ~unread[op.node]
    elif op.kind in JOINING:
        for other, where, pixels in _pieces(flow, op, need):
            yield other, np.logical_or.reduce(need[where].reshape(-1, pixels), axis=1)
    else:
        for other in op.node.all_input_nodes:
            is_by_channel = op.kind in BY_CHANNEL and is_channel_operand(flow, op, other)
            every = np.full(flow.operations[other].channels, op.kind is not Kind.SHAPE)
            yield other, need if is_by_channel else every


def _pieces(flow: Dataflow, op: Operation, need: Mask) -> list[tuple[fx.Node, slice, int]]:
    """Return what is left of the inputs that an operation joins; a pad keeps its only one."""
    is_pad = op.kind is Kind.CHANNEL_PAD
    return [piece for piece in joined(flow, op) if is_pad or need[piece[1]].any()]


def _conv_reads(conv: _ConvNd, need: Mask) -> Mask:
    is_used = need.reshape(conv.groups, -1).any(axis=1)
    slots = np.repeat(is_used, conv.in_channels // conv.groups)
    if not isinstance(conv, SelectConvNd):
        return slots
    reads = np.zeros(conv.in_channels, dtype=bool)
    reads[conv.index.cpu().numpy()[slots & conv.gate.cpu().numpy()]] = True
    return reads


def _keep_filters(op: Operation, need: Mask, round_to: int) -> Channels:
    """Choose the filters to keep: all groups that are left keep equally many of them."""
    by_group = need.reshape(getattr(op.module, "groups", 1), -1).copy()
    most = by_group.sum(axis=1).max()
    for row in by_group:
        if row.any():
            row[np.flatnonzero(~row)[: most - row.sum()]] = True
    if len(by_group) == 1:
        _round_up(by_group[0], round_to)
    return np.flatnonzero(by_group)
