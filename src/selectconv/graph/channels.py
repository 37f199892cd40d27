"""Which channels of a model hang together: a filter goes with all of them, or stays.

A channel passes through whatever works channel by channel. Where channels are added or multiplied,
all operands go together; a group of a grouped conv or of a group norm goes as a whole. What reads
channels in a way that is not known holds them.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from selectconv.core.layer import SelectConvNd
from selectconv.graph.dataflow import (
    JOINING,
    WEIGHTED,
    Dataflow,
    Kind,
    Operation,
    find_shared,
    is_channel_operand,
    joined,
)
from selectconv.graph.input_mean import Chain, activation_of
from selectconv.graph.operations import Family, argument, find_row

Channels = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass
class ChannelGroup:
    """Channels that go together.

    Attributes:
        makers: by the name of a conv, linear layer or norm, the channels of its output.
        readers: by the name of a conv or linear layer, the channels of its input.
    """

    makers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class ChannelGroups:
    """The channels of a model that can be removed, and why the others cannot.

    Attributes:
        groups: what can go.
        inputs: by the name of a reader, the step that makes its input.
        held: by the name of a maker of which no channel can go, what holds them.
    """

    groups: list[ChannelGroup]
    inputs: dict[str, fx.Node]
    held: dict[str, str]


def by_output(module: nn.Module, weight: Tensor) -> Tensor:
    """View the weight of a conv or linear layer, or something of its shape, as (O, I, ...)."""
    return weight.transpose(0, 1) if getattr(module, "transposed", False) else weight


def find_groups(flow: Dataflow, model: nn.Module, *, follows_moves: bool = True) -> ChannelGroups:
    """Find the channels of a traced model that hang together.

    Args:
        flow: the traced model.
        model: the model itself; only channels that its own modules make and read can go.
        follows_moves: whether moved slots of grouped convs hold channels. False: the outcome is
            the same for every allocation of the model.
    """
    return _Finder(flow, model, follows_moves).find()


class _Finder:
    """Numbers every channel that is made, and joins the numbers that hang together."""

    def __init__(self, flow: Dataflow, model: nn.Module, follows_moves: bool) -> None:
        self.flow, self.follows_moves = flow, follows_moves
        self.modules = dict(model.named_modules())
        self.shared = find_shared(flow)
        self.can_be_zero = zero_channels(flow, _can_be_zero)
        self.parent: list[int] = []
        self.holds: dict[int, str] = {}
        self.of: dict[fx.Node, Channels] = {}
        self.makers: list[tuple[str, Channels]] = []
        self.readers: list[tuple[str, fx.Node, Channels]] = []

    def find(self) -> ChannelGroups:
        for node, op in self.flow.operations.items():
            self.of[node] = self._number(op)
        held: dict[int, str] = {}
        for one, why in self.holds.items():
            held.setdefault(self._root(one), why)
        groups: dict[int, ChannelGroup] = {}
        reasons: dict[str, str] = {}
        for name, made in self.makers:
            roots = [self._root(int(one)) for one in made]
            for channel, root in enumerate(roots):
                if root not in held:
                    group = groups.setdefault(root, ChannelGroup())
                    group.makers.setdefault(name, []).append(channel)
            if all(root in held for root in roots):
                reasons[name] = held[roots[0]]
        for name, _, read in self.readers:
            for channel, one in enumerate(read):
                if (root := self._root(int(one))) in groups:
                    groups[root].readers.setdefault(name, []).append(channel)
        inputs = {name: argument(node) for name, node, _ in self.readers}
        return ChannelGroups(list(groups.values()), inputs, reasons)

    def _number(self, op: Operation) -> Channels:
        """Number the channels of an operation's output."""
        node = op.node
        if op.kind in WEIGHTED:
            return self._number_layer(op)
        if op.kind in JOINING:
            numbers = self._new(op.channels)
            for other, where, pixels in joined(self.flow, op):
                numbers[where] = np.repeat(self.of[other], pixels)
            return numbers
        if op.kind is Kind.CHANNELWISE and (operands := channel_operands(self.flow, op)):
            first = self.of[operands[0]]
            for other in operands[1:]:
                self._join(first, self.of[other])
            self._hold_inputs(op, "broadcast over other channels", besides=operands)
            return first
        if op.kind in (Kind.SHAPE, Kind.TENSOR):
            return self._new(op.channels)
        what = f"read by `{node.target if op.module is not None else node.name}`"
        if op.module is not None:
            what += f" ({type(op.module).__name__})"
        self._hold_inputs(op, "an output of the model" if op.kind is Kind.OUTPUT else what)
        made = self._new(op.channels)
        self._hold(made, "the model's input" if op.kind is Kind.INPUT else what)
        return made

    def _number_layer(self, op: Operation) -> Channels:
        """Number what a conv, a linear layer or a norm makes."""
        name, module, before = op.name, op.module, self.of[argument(op.node)]
        assert module is not None
        groups = getattr(module, "groups", getattr(module, "num_groups", 1))  # conv, group norm
        made = before if op.kind is Kind.NORM else self._new(op.channels)
        if groups == 1 and type(module) is nn.GroupNorm:
            self._hold(before, f"`{name}` (GroupNorm) normalises all channels together")
        if groups > 1:
            firsts = before.reshape(groups, -1)[:, 0]
            for numbers in (before, made):
                self._join(firsts.repeat(len(numbers) // groups), numbers)
        elif op.kind is not Kind.NORM:
            self.readers.append((name, op.node, before))
            if not isinstance(module, SelectConvNd):
                stuck = before[~self.can_be_zero[argument(op.node)]]
                self._hold(stuck, f"`{name}` reads values that cannot be made zero")
        self.makers.append((name, made))
        own = self.modules.get(name)
        reasons = {
            f"`{name}` is not a module of the model": own is None,
            f"`{name}` is called twice, or shares its weight": op.node in self.shared,
            f"the weight of `{name}` is recomputed": hasattr(own, "parametrizations"),
            f"`{name}` has groups and moved slots": self.follows_moves
            and groups > 1
            and isinstance(module, SelectConvNd)
            and bool(module.moved.any()),
        }
        for why in (why for why, holds in reasons.items() if holds):
            self._hold(before, why)
            self._hold(made, why)
        return made

    def _new(self, count: int) -> Channels:
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return np.arange(start, start + count)

    def _root(self, one: int) -> int:
        while self.parent[one] != one:
            self.parent[one] = self.parent[self.parent[one]]
            one = self.parent[one]
        return one

    def _join(self, these: Channels, those: Channels) -> None:
        for one, other in zip(these.tolist(), those.tolist(), strict=True):
            self.parent[self._root(other)] = self._root(one)

    def _hold(self, channels: Channels, why: str) -> None:
        for one in channels.tolist():
            self.holds.setdefault(one, why)

    def _hold_inputs(self, op: Operation, why: str, besides: list[fx.Node] | None = None) -> None:
        for other in op.node.all_input_nodes:
            if other not in (besides or []):
                self._hold(self.of[other], why)


def channel_operands(flow: Dataflow, op: Operation) -> list[fx.Node]:
    """Return the inputs of a channelwise operation that have a channel for each of its outputs."""
    return [
        other
        for other in op.node.all_input_nodes
        if flow.operations[other].kind is not Kind.TENSOR and is_channel_operand(flow, op, other)
    ]


def zero_channels(flow: Dataflow, of_layer: Callable[[Operation], Mask]) -> dict[fx.Node, Mask]:
    """Find the channels of each value that are zero, whatever the model's input is.

    Args:
        flow: the traced model.
        of_layer: says of a conv, a linear layer or a norm which of its outputs its parameters make
            zero.
    """
    zero: dict[fx.Node, Mask] = {}
    for node, op in flow.operations.items():
        if op.kind in WEIGHTED:
            zero[node] = of_layer(op)
            if (groups := getattr(op.module, "groups", 1)) > 1:  # what it reads goes with it
                before = zero[argument(node)].reshape(groups, -1)
                zero[node] &= np.logical_and.reduce(before, axis=1).repeat(op.channels // groups)
        elif op.kind in JOINING:
            zero[node] = np.ones(op.channels, dtype=bool)
            for other, where, pixels in joined(flow, op):
                zero[node][where] = np.repeat(zero[other], pixels)
        elif op.kind is Kind.CHANNELWISE:
            zero[node] = _zero_after(flow, op, zero)
        else:
            zero[node] = np.zeros(op.channels, dtype=bool)
    return zero


def _zero_after(flow: Dataflow, op: Operation, zero: dict[fx.Node, Mask]) -> Mask:
    """Find the zero channels of what works channel by channel."""
    operands = channel_operands(flow, op)
    masks = [zero[other] for other in operands]
    never: Mask = np.zeros(op.channels, dtype=bool)
    if not any(mask.any() for mask in masks):
        return never
    family = find_row(op.node, op.module).family
    if family is not Family.ARITHMETIC:
        return never if family is Family.ACTIVATION and not _keeps_zero(op) else masks[0]
    name = str(getattr(op.node.target, "__name__", op.node.target))
    values = [value for value in op.node.args if isinstance(value, fx.Node | int | float)]
    if name == "mul":
        return reduce(operator.or_, masks)
    if name in ("add", "sub") and len(values) == len(masks) and not op.node.kwargs:
        return reduce(operator.and_, masks)
    # 0 / 0 is not 0.
    is_kept = name in ("div", "truediv", "neg") and len(masks) == 1 and values[0] is operands[0]
    return masks[0] if is_kept else never


def _keeps_zero(op: Operation) -> bool:
    """Return whether an activation of zero is zero."""
    call = activation_of(op.node, op.module)
    x = torch.zeros(1, *op.shape[1:2], *[1] * (len(op.shape) - 2))
    with torch.no_grad():
        return call is not None and not bool(Chain((call,))(x).any())


def _can_be_zero(op: Operation) -> Mask:
    """Return which outputs of a layer can be made zero by its parameters: all, or none."""
    is_affine = op.kind is not Kind.NORM or getattr(op.module, "weight", None) is not None
    return np.full(op.channels, is_affine and _act_keeps_zero(op.module))


def is_zero(op: Operation) -> Mask:
    """Return which outputs of a layer its parameters make zero."""
    module, never = op.module, np.zeros(op.channels, dtype=bool)
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if module is None or weight is None or not _act_keeps_zero(module):
        return never
    rows = (
        by_output(module, weight.detach()).flatten(1)
        if weight.ndim > 1
        else weight.detach()[:, None]
    )
    zero = rows[:, 0] == 0  # few are, in most models
    if bias is not None:
        zero = zero & (bias.detach() == 0)
    found = zero.nonzero().flatten()
    zero[found] = ~rows[found].any(dim=1)
    return zero.cpu().numpy() if len(found) else never


def _act_keeps_zero(module: nn.Module | None) -> bool:
    """Return whether the activation that some norms of timm have keeps zero."""
    act = getattr(module, "act", None)
    return act is None or not bool(act(torch.zeros(1)).any())
