"""What a model's graph shows about a conv's input: its mean source, and whether it is raw input.

The graph is torch.fx's. Walking back from a conv, elementwise activations collect until a batch
norm gives the closed form; what keeps a channel's mean is passed through. Anything else ends the
walk: the caller observes the mean instead.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from selectconv.core.mean_source import (
    BatchNormMean,
    ClosedForm,
    ConcatMean,
    ConstantMean,
    SelectedMean,
)
from selectconv.core.moments import Activation
from selectconv.graph.example import settled_arguments
from selectconv.graph.mean_rules import (
    Chain,
    activation,
    differ_by_channel,
    is_leaf,
    keeps_mean,
    keeps_values,
    norm_and_activations,
    raw_inputs,
    writes_into,
)
from selectconv.graph.operations import Family, argument, family_of
from selectconv.graph.rearrangement import is_rearrangement, moved_channels
from selectconv.graph.tracer import Tracer, first_line


@dataclass(frozen=True)
class ConvInput:
    """What the graph shows of one conv's input.

    Attributes:
        source: the closed form of its mean; None: not shown.
        is_raw: it is reached from the model's input without a norm, activation or conv between.
        calls: how often a run of the graph calls the conv.
    """

    source: ClosedForm | None = None
    is_raw: bool = False
    calls: int = 1


@dataclass(frozen=True)
class ConvInputs:
    """A model's convs, by module identity, with what the graph shows of their inputs.

    Attributes:
        inputs: by `id(conv)`; convs that the traced forward does not reach are missing.
        failure: why the model could not be traced as a whole; None: it was.
    """

    inputs: dict[int, ConvInput] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Calls:
    """How a run called a module.

    Attributes:
        settled: the arguments that it decides by (`settled_arguments`); None: the calls differ.
        number: of calls.
    """

    settled: dict[str, Any] | None
    number: int = 1


def find_conv_inputs(model: nn.Module, calls: Mapping[int, Calls] | None = None) -> ConvInputs:
    """Trace a model and look at every conv's input.

    A model that cannot be traced shows nothing by itself. Where it is known which modules a run of
    it called, those of its parts that can be traced are looked at one by one.

    Args:
        model: the model.
        calls: how a run called each module, by `id(module)`; None: not known.
    """
    by_default = Calls(settled_arguments(model))
    found = _trace_whole(model, (calls or {}).get(id(model), by_default))
    if found.failure is None or calls is None:
        return found
    inputs: dict[int, ConvInput] = {}
    parts = list(model.children())
    while parts:
        part = parts.pop()
        # If other code calls a part's modules, tracing its own forward would mislead.
        called = calls.get(id(part))
        shown = ConvInputs(failure="not called") if called is None else _trace_whole(part, called)
        if shown.failure is not None:
            parts.extend(part.children())
            continue
        for key, seen in shown.inputs.items():
            if key in calls and calls[key].number == calls[id(part)].number * seen.calls:
                # What reaches the part is not known to be raw.
                inputs[key] = ConvInput(seen.source, calls=seen.calls)
    return ConvInputs(inputs, found.failure)


def _trace_whole(model: nn.Module, calls: Calls) -> ConvInputs:
    if calls.settled is None:
        return ConvInputs(failure="it is called in several ways")
    before = _random_state()
    try:
        with _left_alone(model):
            graph = Tracer(is_leaf, calls.settled).trace(model)
    except Exception as error:  # user code under a tracer can fail in any way; the reason is kept
        return ConvInputs(failure=first_line(error))
    if _random_state() != before:  # as in stochastic depth: the graph may be there by chance
        return ConvInputs(failure="it draws random numbers, by which it may decide what to do")
    modules = dict(model.named_modules())
    reached: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), _ConvNd):
            reached.setdefault(id(modules[str(node.target)]), []).append(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    inputs = {}
    for key, nodes in reached.items():
        conv = cast(_ConvNd, modules[str(nodes[0].target)])
        walk = _Walk(modules, order, order[nodes[0]], axes=len(conv.kernel_size))
        is_raw = any(walk.is_raw(argument(node)) for node in nodes)
        source = None
        if len(nodes) == 1 and not is_raw:  # a conv that is called twice has no single input
            source = walk.closed_form(argument(nodes[0]), (), conv.in_channels)
            if source is not None and source.num_channels != conv.in_channels:
                source = None
        inputs[key] = ConvInput(source, is_raw, len(nodes))
    return ConvInputs(inputs)


def _random_state() -> tuple[Any, ...]:
    """Return where the random numbers of torch, NumPy and Python stand."""
    _, keys, *rest = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes(),
        rest,
        random.getstate(),
    )


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Undo what a model's own code does to its modules while it is traced.

    A forward may keep features, count its calls or update statistics in place; the tracer itself
    hangs the constants that it meets on the model.
    """
    dicts = [
        (own, dict(own))
        for module in model.modules()
        for own in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for own, held in dicts:
            own.clear()
            own.update(held)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


class _Walk:
    """Walks a traced graph backwards from a conv.

    Args:
        modules: the model's modules by name.
        order: where each node stands in the program.
        end: where the conv stands.
        axes: the conv's spatial axes.
    """

    def __init__(
        self, modules: dict[str, nn.Module], order: dict[fx.Node, int], end: int, axes: int
    ) -> None:
        self.modules = modules
        self.order = order
        self.end = end
        self.axes = axes

    def closed_form(
        self, node: Any, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        """Find E of `acts(node)` in closed form.

        Args:
            node: where the walk stands.
            acts: the activations passed on the way, in the order in which they are applied.
            width: the number of channels of `node`, where it is known.
        """
        if not isinstance(node, fx.Node) or self._is_overwritten(node):
            return None
        module = self._module(node)
        norm = norm_and_activations(module)
        if norm is not None:
            bn, own = norm
            return BatchNormMean(bn, _compose((*own, *acts)))
        act = activation(node, module)
        if act is not None:
            return self.closed_form(argument(node), (act, *acts), width)
        if keeps_values(node, module):
            return self.closed_form(argument(node), acts, width)
        family = family_of(node, module)
        if family is Family.CONCAT:
            return self._concat(node, acts, width)
        if family is Family.PAD:
            return self._zero_padded(node, acts, width)
        if is_rearrangement(node, module):
            return self._rearranged(node, acts)
        # A mean that is kept says nothing about the mean of a non-linear function after it.
        if not acts and keeps_mean(node, module):
            return self.closed_form(argument(node), (), width)
        return None

    def is_raw(self, node: Any, seen: set[fx.Node] | None = None) -> bool:
        """Return whether the model's input reaches `node` past norms, activations and convs."""
        seen = set() if seen is None else seen
        if not isinstance(node, fx.Node) or node in seen:
            return False
        seen.add(node)
        if node.op == "placeholder":
            return True
        return any(self.is_raw(before, seen) for before in raw_inputs(node, self._module(node)))

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Return whether something off the conv's path may have written into `node` before it."""
        return len(node.users) > 1 and any(self._is_writer(user, node) for user in node.users)

    def _is_writer(self, user: fx.Node, node: fx.Node) -> bool:
        if self.order[user] >= self.end:
            return False
        module = self._module(user)
        if writes_into(user, module, node):
            return True
        # What is written into a view of it is written into it as well.
        is_view = keeps_values(user, module) or is_rearrangement(user, module)
        return is_view and any(self._is_writer(further, user) for further in user.users)

    def _rearranged(self, node: fx.Node, acts: tuple[Activation, ...]) -> ClosedForm | None:
        start: Any = node
        while isinstance(start, fx.Node) and is_rearrangement(start, self._module(start)):
            if self._is_overwritten(start):
                return None
            start = argument(start)
        if differ_by_channel(acts) or not isinstance(start, fx.Node):
            return None
        source = self.closed_form(start, acts, None)
        if source is None:
            return None
        moved = moved_channels(start, node, source.num_channels, self.axes, self._module)
        if moved is None:
            return None
        is_same = torch.equal(moved, torch.arange(source.num_channels))
        return source if is_same else SelectedMean(source, moved.tolist())

    def _concat(
        self, node: fx.Node, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        tensors = argument(node, 0, "tensors")
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        if dim not in (1, -1 - self.axes) or not isinstance(tensors, list | tuple):
            return None
        if differ_by_channel(acts):
            return None
        parts = [self.closed_form(tensor, acts, None) for tensor in tensors]
        # Appended zeros do not say how many they are: what is missing must be theirs.
        unknown = [i for i, part in enumerate(parts) if part is None]
        if len(unknown) == 1 and width is not None and self._is_zeros(tensors[unknown[0]]):
            rest = width - sum(part.num_channels for part in parts if part is not None)
            if rest > 0:
                parts[unknown[0]] = _constant(acts, rest)
        if any(part is None for part in parts):
            return None
        return ConcatMean([part for part in parts if part is not None])

    def _is_zeros(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or family_of(node, None) is not Family.ZEROS:
            return False
        return not self._is_overwritten(node)

    def _zero_padded(
        self, node: fx.Node, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        pad = argument(node, 1, "pad")
        mode = argument(node, 2, "mode", "constant")
        value = argument(node, 3, "value")
        if not isinstance(pad, list | tuple) or len(pad) < 2 or differ_by_channel(acts):
            return None
        # F.pad counts from the last axis: the pair after the spatial ones is that of the channels.
        *spatial, front, back = pad
        if len(spatial) != 2 * self.axes or any(size != 0 for size in spatial):
            return None
        if not (isinstance(front, int) and isinstance(back, int)) or min(front, back) < 0:
            return None
        if mode != "constant" or value not in (None, 0, 0.0):
            return None
        inner = None if width is None else width - front - back
        part = self.closed_form(argument(node), acts, inner)
        if part is None or (inner is not None and part.num_channels != inner):
            return None
        parts: list[ClosedForm] = [part]
        if front:
            parts.insert(0, _constant(acts, front))
        if back:
            parts.append(_constant(acts, back))
        return ConcatMean(parts)


def _compose(acts: tuple[Activation, ...]) -> Activation | None:
    if not acts:
        return None
    return acts[0] if len(acts) == 1 else Chain(acts)


def _constant(acts: tuple[Activation, ...], num_channels: int) -> ConstantMean:
    return ConstantMean(Chain(acts)(torch.zeros(1)).item(), num_channels)
