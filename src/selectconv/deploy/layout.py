"""Which channels a compressed model keeps, and where it gathers some of them.

From the outputs back, a channel is needed if someone needs what is computed from it: closed slots
read nothing. From the inputs on, each value then keeps what is needed of it, and a reader that
wants less than its input keeps gathers its share. Counting and compressing read the same plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from selectconv.core.layer import SelectConvNd
from selectconv.deploy.parts import (
    MACS_PER_PASS,
    Blocks,
    Channels,
    Part,
    has_shifts,
    narrow,
    plan_parts,
)
from selectconv.graph.dataflow import Dataflow, Kind, Operation
from selectconv.graph.operations import argument

Mask = npt.NDArray[np.bool_]


@dataclass
class Layout:
    """What a compressed model keeps of each value.

    Attributes:
        kept: by node, the channels that its output keeps, in order; nodes that nobody needs are
            missing.
        wanted: by node that works channel by channel, the channels that its inputs are brought to.
        pieces: by concatenation, its inputs and the channels that they are brought to.
        parts: by conv, what the plain conv reads that replaces it.
    """

    kept: dict[fx.Node, Channels] = field(default_factory=dict)
    wanted: dict[fx.Node, Channels] = field(default_factory=dict)
    pieces: dict[fx.Node, list[tuple[fx.Node, Channels]]] = field(default_factory=dict)
    parts: dict[fx.Node, list[Part]] = field(default_factory=dict)


def plan_layout(flow: Dataflow, round_to: int | None = None) -> Layout:
    """Decide what to keep of every value of a traced model, for its present allocation.

    Args:
        flow: the traced model.
        round_to: as for `compress`.
    """
    return _Planner(flow, round_to).plan()


class _Planner:
    def __init__(self, flow: Dataflow, round_to: int | None) -> None:
        self.flow = flow
        self.shared = _find_shared(flow)
        self.blocks = Blocks(round_to, sum(one.numel() for one in flow.root.parameters()))
        self.needed = needed = _find_needed(flow, self.shared, self.blocks)
        self.round_to = round_to or 1
        self.layout = Layout()
        self.costs = _channel_costs(flow, needed)

    def plan(self) -> Layout:
        for node, op in self.flow.operations.items():
            if node in self.needed:
                self.layout.kept[node] = self._keep(op, self.needed[node])
        return self.layout

    def _keep(self, op: Operation, need: Mask) -> Channels:
        if op.kind in (Kind.CONV, Kind.LINEAR):
            kept = _keep_filters(op, need, self.round_to)
            if op.kind is Kind.CONV:
                self.layout.parts[op.node] = self._parts(op, kept)
            return kept
        if op.kind in (Kind.NORM, Kind.CHANNELWISE):
            kept = self.layout.wanted[op.node] = self._keep_channels(op, need)
            return kept
        if op.kind is Kind.CONCAT:
            return self._keep_concat(op, need)
        if op.kind is Kind.CHANNEL_PAD:
            return self._keep_padded(op, need)
        return np.arange(op.channels)

    def _parts(self, op: Operation, filters: Channels) -> list[Part]:
        assert isinstance(op.module, _ConvNd)
        before = argument(op.node, 0, "input")
        spatial = self.flow.operations[before].shape[2:]
        # A conv that is called twice must read the same number of channels each time.
        round_to = None if op.node in self.shared else self.round_to
        available = self.layout.kept[before]
        block = self.blocks.of_shifts(op.module)
        return plan_parts(op.module, filters, available, spatial, round_to, block)

    def _keep_channels(self, op: Operation, need: Mask) -> Channels:
        """Choose the channels of something that works channel by channel."""
        inputs = [
            self.layout.kept[other]
            for other in op.node.all_input_nodes
            if self.flow.operations[other].kind is not Kind.TENSOR
            and is_channel_operand(self.flow, op, other)
        ]
        wanted = np.flatnonzero(need)
        if not inputs:
            return wanted
        if any(not np.array_equal(inputs[0], other) for other in inputs):
            return wanted  # one of them is gathered in any case
        return narrow(inputs[0], wanted, self.costs[op.node] / len(inputs), self.round_to)

    def _keep_concat(self, op: Operation, need: Mask) -> Channels:
        # Nothing is gathered here: the readers of what is joined gather in any case.
        pieces, start = [], 0
        for other in argument(op.node, 0, "tensors"):
            stop = start + self.flow.operations[other].channels
            if need[start:stop].any():
                pieces.append((other, self.layout.kept[other], start))
            start = stop
        self.layout.pieces[op.node] = [(other, kept) for other, kept, _ in pieces]
        return np.concatenate([kept + start for _, kept, start in pieces])

    def _keep_padded(self, op: Operation, need: Mask) -> Channels:
        before = argument(op.node, 0, "input")
        front = argument(op.node, 1, "pad")[-2]
        is_zero = need.copy()
        is_zero[front : front + self.flow.operations[before].channels] = False
        return np.sort(np.concatenate([np.flatnonzero(is_zero), self.layout.kept[before] + front]))


def _channel_costs(flow: Dataflow, needed: dict[fx.Node, Mask]) -> dict[fx.Node, float]:
    """Estimate what one more channel costs from each operation on, in passes over its elements."""
    costs: dict[fx.Node, float] = {}
    for node, op in reversed(flow.operations.items()):
        if node not in needed:
            continue
        cost = 1.0
        size = math.prod(op.shape)
        for user in node.users:
            if user not in needed or not size:
                continue
            after = flow.operations[user]
            share = math.prod(after.shape) * op.channels / size / max(after.channels, 1)
            if after.kind is Kind.CONV:
                assert isinstance(after.module, _ConvNd)
                filters = int(needed[user].sum()) / after.module.groups
                macs = filters * math.prod(after.module.kernel_size)
                cost += share * macs / MACS_PER_PASS
            elif after.kind in (Kind.NORM, Kind.CHANNELWISE):
                cost += share * costs[user]
        costs[node] = cost
    return costs


def is_channel_operand(flow: Dataflow, op: Operation, other: fx.Node) -> bool:
    """Return whether an input of a channelwise operation has a channel for each of its outputs."""
    shape = flow.operations[other].shape
    return len(shape) == len(op.shape) and shape[1] == op.shape[1]


def channel_axis(flow: Dataflow, op: Operation, other: fx.Node) -> int | None:
    """Return the axis of a parameter that lies along an operation's channels; None: none does."""
    shape = flow.operations[other].shape
    axis = len(shape) - len(op.shape) + 1
    return axis if axis >= 0 and shape[axis] == op.shape[1] > 1 else None


def is_in_module(flow: Dataflow, layout: Layout, tensor: fx.Node) -> bool:
    """Return whether a tensor that is read by itself belongs to a module that is kept."""
    owner = str(tensor.target).rpartition(".")[0]
    return any(
        node.op == "call_module" and node.target == owner and node in layout.kept
        for node in flow.operations
    )


def is_read_for_type(tensor: fx.Node) -> bool:
    """Return whether nothing but the type of a tensor is read."""
    return all(
        user.target is getattr and user.args[1] in ("dtype", "device") for user in tensor.users
    )


def _find_needed(flow: Dataflow, shared: set[fx.Node], blocks: Blocks) -> dict[fx.Node, Mask]:
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
        if node in shared:  # called twice, with one set of weights: those must serve both
            needed[node][:] = True
        if not needed[node].any():  # only its shape is read
            needed[node][:1] = True
        if _is_depthwise(op.module):
            _round_up(needed[node], blocks.of_depthwise(len(needed[node])))
        for other, mask in reads(flow, op, needed[node]):
            if other in needed:
                needed[other] |= mask
            else:
                needed[other] = mask.copy()
            if isinstance(op.module, _ConvNd) and has_shifts(op.module):
                _round_up(needed[other], blocks.of_shifts(op.module))
    return needed


def _is_depthwise(module: nn.Module | None) -> bool:
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels


def _round_up(need: Mask, block: int) -> None:
    """Mark more channels as needed, up to a multiple of `block` or all."""
    need[np.flatnonzero(~need)[: -int(need.sum()) % block]] = True


def _find_shared(flow: Dataflow) -> set[fx.Node]:
    calls: dict[int, list[fx.Node]] = {}
    for node, op in flow.operations.items():
        if op.module is not None:
            for parameter in op.module.parameters(recurse=False):
                calls.setdefault(id(parameter), []).append(node)
    return {node for nodes in calls.values() if len(nodes) > 1 for node in nodes}


def reads(flow: Dataflow, op: Operation, need: Mask) -> Iterator[tuple[fx.Node, Mask]]:
    """Yield what an operation needs of each of its inputs, if `need` is needed of its output."""
    node = op.node
    if op.kind is Kind.CONV:
        yield argument(node, 0, "input"), _conv_reads(op.module, need)
    elif op.kind is Kind.CONCAT:
        start = 0
        for other in argument(node, 0, "tensors"):
            stop = start + flow.operations[other].channels
            if need[start:stop].any():
                yield other, need[start:stop]
            start = stop
    elif op.kind is Kind.CHANNEL_PAD:
        before = argument(node, 0, "input")
        front = argument(node, 1, "pad")[-2]
        yield before, need[front : front + flow.operations[before].channels]
    else:
        for other in node.all_input_nodes:
            channelwise = op.kind in (Kind.NORM, Kind.CHANNELWISE)
            if channelwise and is_channel_operand(flow, op, other):
                yield other, need
            else:
                yield other, np.full(flow.operations[other].channels, op.kind is not Kind.SHAPE)


def _conv_reads(module: nn.Module | None, need: Mask) -> Mask:
    assert isinstance(module, _ConvNd)
    in_use = np.repeat(
        need.reshape(module.groups, -1).any(axis=1), module.in_channels // module.groups
    )
    if not isinstance(module, SelectConvNd):
        return in_use
    slots = in_use & module.gate.cpu().numpy()
    reads = np.zeros(module.in_channels, dtype=bool)
    reads[module.index.cpu().numpy()[slots]] = True
    if not reads.any():  # the user closed all slots: a conv needs one input, of weight zero
        reads[0] = True
    return reads


def _keep_filters(op: Operation, need: Mask, round_to: int) -> Channels:
    """Choose the filters to keep: all groups that are left keep equally many of them."""
    groups = getattr(op.module, "groups", 1)
    by_group = need.reshape(groups, -1).copy()
    count = int(by_group.sum(axis=1).max())
    if groups == 1:
        count = min(math.ceil(count / round_to) * round_to, len(need))
    for row in by_group:
        if row.any():
            row[np.flatnonzero(~row)[: count - int(row.sum())]] = True
    return np.flatnonzero(by_group)
