"""What a model's graph shows about a conv's input: its mean source, and whether it is raw input.

The graph is torch.fx's. Walking back from a conv, elementwise activations collect until a batch
norm gives the closed form; what keeps a channel's mean is passed through. Anything else ends the
walk: the caller observes the mean instead. Where splits, shuffles and slices put each channel is
tried, on a small tensor whose every value is the number of its channel.
"""

import copy
import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from selectconv.core.mean_source import (
    BatchNormMean,
    ClosedForm,
    ConcatMean,
    ConstantMean,
    SelectedMean,
)
from selectconv.core.models import selective_layers
from selectconv.errors import BadValue
from selectconv.graph.dataflow import Dataflow, Kind
from selectconv.graph.operations import (
    ATTRIBUTES,
    IN_PLACE_OPERATORS,
    Family,
    argument,
    channel_padding,
    concatenated,
    family_of,
    find_module_row,
    find_row,
    functions_of,
    setting,
    writes,
)
from selectconv.graph.tracer import Tracer, first_line, module_of

_SAME_VALUES = {Family.IDENTITY, Family.CAST, Family.CONTIGUOUS, Family.COPY}
_SAME_MEAN = {Family.DROPOUT, Family.RESIZE}
# After these, and after modules with weights of their own, raw input is no longer raw.
_RAW_ENDS = {Family.ACTIVATION, Family.LAYER, Family.NORM, Family.SIZE}
_UNPADDED = (0, (0,), (0, 0), (0, 0, 0))
# How sizes are worked out.
_ARITHMETIC = (
    operator.floordiv, operator.mul, operator.add, operator.sub, operator.neg, *IN_PLACE_OPERATORS
)  # fmt: skip
# A probe's images and pixels: even, and different from one another along every axis.
_PROBE_IMAGES, _PROBE_PIXELS = 3, (4, 6, 8)


@dataclass(frozen=True)
class ConvInput:
    """What the graph shows of one conv's input.

    Attributes:
        source: the closed form of its mean; None: not shown.
        is_raw: it is reached from the model's input without a norm, activation or conv between.
    """

    source: ClosedForm | None = None
    is_raw: bool = False


def find_conv_inputs(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[int, ConvInput], str | None]:
    """Trace a model, which is left as it is, and look at every conv's input.

    Args:
        model: the model.
        args: of an example; its forward may decide by those that are no tensors, or by defaults.
        kwargs: of an example, by name.

    Returns:
        What the graph shows of the convs that the traced forward reaches, by `id`; and why the
        model could not be traced, or None.
    """
    before = _random_state()
    try:
        bound = signature(model.forward).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        # A forward may keep features, count its calls or update statistics: a copy's, here.
        shared = (*model.parameters(), *selective_layers(model).values())
        traced = copy.deepcopy(model, {id(own): own for own in shared})
        graph = Tracer(_is_leaf, bound.arguments).trace(traced)
    except Exception as error:  # user code under a tracer can fail in any way; the reason is kept
        return {}, first_line(error)
    if _random_state() != before:  # as in stochastic depth: the graph may be there by chance
        return {}, "it draws random numbers, by which it may decide what to do"
    modules = dict(model.named_modules())
    calls: dict[_ConvNd, list[Any]] = {}  # what reaches each conv
    raw: set[Any] = set()  # what the model's input reaches past norms, activations and convs
    for node in graph.nodes:
        module = module_of(modules, node)
        if isinstance(module, _ConvNd):
            calls.setdefault(module, []).append(argument(node))
        is_reached = node.op == "placeholder" or not raw.isdisjoint(node.all_input_nodes)
        if is_reached and not _ends_raw(node, module):
            raw.add(node)
    inputs = {}
    for conv, values in calls.items():
        source, is_raw = None, not raw.isdisjoint(values)
        if len(values) == 1 and not is_raw:  # a conv that is called twice has no single input
            walk = _Walk(modules, len(conv.kernel_size), conv.training)
            source = walk.closed_form(values[0], ())
            if source is not None and source.num_channels != conv.in_channels:
                source = None
            elif source is not None:
                source.is_found = True
        inputs[id(conv)] = ConvInput(source, is_raw)
    return inputs, None


def closed_form_of(
    flow: Dataflow, value: fx.Node, modules: dict[str, nn.Module], is_training: bool
) -> ClosedForm | None:
    """Find E of a traced value in closed form; None: not shown.

    Args:
        flow: the traced model.
        value: what a layer reads.
        modules: the model's, by name.
        is_training: whether the layer is in training mode.
    """
    op, pixels = flow.operations[value], 1
    while op.kind is Kind.FLATTEN or family_of(op.node, op.module) is Family.MEAN:
        if op.kind is Kind.OTHER:
            return None
        before = flow.operations[argument(op.node)]
        pixels *= op.channels // before.channels
        op = before
    source = _Walk(modules, len(op.shape) - 2, is_training).closed_form(op.node, ())
    if source is None or source.num_channels != op.channels:
        return None
    return SelectedMean(source, np.arange(op.channels).repeat(pixels).tolist())


def _random_state() -> tuple[Any, ...]:
    """Return where the random numbers of torch, NumPy and Python stand."""
    _, keys, *rest = np.random.get_state()
    state = torch.get_rng_state().numpy().tobytes()
    return state, np.asarray(keys).tobytes(), rest, random.getstate()


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module is to be seen as one step, although it may not be torch's own."""
    return isinstance(module, _ConvNd | _BatchNorm) or find_module_row(module).family is not None


class Call(NamedTuple):
    """An elementwise function, with the arguments that follow its input."""

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


class Chain:
    """Elementwise functions one after another, as one callable."""

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls = calls

    def __call__(self, x: Tensor) -> Tensor:
        """Apply them all."""
        for function, args, kwargs in self.calls:
            weights = function.parameters() if isinstance(function, nn.Module) else iter(())
            weight = next(weights, None)  # PReLU computes in its weight's dtype only
            x = function(x if weight is None else x.to(weight), *args, **kwargs)
        return x

    def __repr__(self) -> str:
        words = []
        for function, args, kwargs in self.calls:
            settings = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
            name = getattr(function, "__name__", type(function).__name__)
            words.append(f"{name}({', '.join(settings)})" if settings else name)
        return " + ".join(words)


class _Walk:
    """Walks a traced graph backwards from a conv.

    Args:
        modules: the model's modules by name.
        axes: the conv's spatial axes.
        is_training: whether the conv is in training mode.
    """

    def __init__(self, modules: dict[str, nn.Module], axes: int, is_training: bool) -> None:
        self.modules = modules
        self.axes = axes
        self.is_training = is_training

    def closed_form(self, node: Any, acts: tuple[Call, ...]) -> ClosedForm | None:
        """Find E of `acts(node)` in closed form.

        Args:
            node: where the walk stands.
            acts: the activations passed on the way, in the order in which they are applied.
        """
        if not isinstance(node, fx.Node) or (len(node.users) > 1 and self._is_written(node)):
            return None
        module, before = module_of(self.modules, node), argument(node)
        family = family_of(node, module)
        if isinstance(module, _BatchNorm) and family is Family.NORM:
            # One that stays in evaluation mode normalises by other statistics than its input's.
            is_fixed = self.is_training and not module.training and module.running_mean is not None
            return None if is_fixed else _norm_mean(module, acts)
        if family is Family.ACTIVATION:
            act = activation_of(node, module)
            return None if act is None else self.closed_form(before, (act, *acts))
        # A mean that is kept says nothing about the mean of a non-linear function after it.
        if _keeps_values(node, module) or (not acts and _keeps_mean(node, module)):
            return self.closed_form(before, acts)
        if any(getattr(act.function, "num_parameters", 1) > 1 for act in acts):
            return None  # a PReLU with a slope for each channel of what is joined or moved
        if family is Family.CONCAT:
            parts = [self.closed_form(x, acts) for x in concatenated(node, self.axes) or [None]]
            known = [part for part in parts if part is not None]
            return ConcatMean(known) if len(known) == len(parts) else None
        if family is Family.PAD:
            return self._padded(node, acts)
        return self._rearranged(node, acts) if is_rearrangement(node, module) else None

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether a step writes into `node`, or into a view of it."""
        for user in node.users:
            module = module_of(self.modules, user)
            is_view = _keeps_values(user, module) or is_rearrangement(user, module)
            if argument(user) is node and (
                writes(user, module) or (is_view and self._is_written(user))
            ):
                return True
        return False

    def _padded(self, node: fx.Node, acts: tuple[Call, ...]) -> ClosedForm | None:
        added = channel_padding(node, self.axes)
        if added is None or any(argument(node, 1, "pad")[: 2 * self.axes]):
            return None
        part = self.closed_form(argument(node), acts)
        if part is None:
            return None
        zero = Chain(acts)(torch.zeros(1)).item()
        front, back = ([ConstantMean(zero, size)] if size else [] for size in added)
        return ConcatMean([*front, part, *back])

    def _rearranged(self, node: fx.Node, acts: tuple[Call, ...]) -> ClosedForm | None:
        start: Any = node
        while isinstance(start, fx.Node) and is_rearrangement(
            start, module_of(self.modules, start)
        ):
            if len(start.users) > 1 and self._is_written(start):  # off the conv's path
                return None
            start = argument(start)
        source = self.closed_form(start, acts)
        if source is None:
            return None
        moved = moved_channels(start, node, source.num_channels, self.axes, self.modules)
        if moved is None or torch.equal(moved, torch.arange(source.num_channels)):
            return None if moved is None else source
        return SelectedMean(source, moved.tolist())


def _norm_mean(norm: _BatchNorm, acts: tuple[Call, ...]) -> BatchNormMean | None:
    """Return the mean of a batch norm's output after these activations, and after its own."""
    act, drop = (getattr(norm, name, nn.Identity()) for name in ("act", "drop"))  # timm's have them
    family = find_module_row(act).family
    # What drops values before a non-linear function changes the mean after it.
    if family not in (Family.IDENTITY, Family.ACTIVATION) or type(drop) is not nn.Identity:
        return None
    acts = (Call(act), *acts) if family is Family.ACTIVATION else acts
    if len(acts) == 1 and not (acts[0].args or acts[0].kwargs):
        return BatchNormMean(norm, acts[0].function)
    return BatchNormMean(norm, Chain(acts) if acts else None)


def activation_of(node: fx.Node, module: nn.Module | None) -> Call | None:
    """Return the function of a step of family ACTIVATION, with its settings; None: not fixed."""
    if module is not None:
        return Call(module)
    if any(isinstance(value, fx.Node) for value in (*node.args[1:], *node.kwargs.values())):
        return None  # computed on the way: not a fixed function of one input
    row = find_row(node, module)
    is_plain = node.target in functions_of(row).values()  # no method, and none that writes
    function = node.target if is_plain else row.function
    kwargs = {key: value for key, value in node.kwargs.items() if key not in ("input", "inplace")}
    return Call(function, node.args[1:], kwargs)


def _keeps_values(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step only passes on, or repeats, the values that it gets."""
    family = family_of(node, module)
    is_nearest = str(setting(node, module, 3, "mode", "nearest")).startswith("nearest")
    return family in _SAME_VALUES or (family is Family.RESIZE and is_nearest)


def _keeps_mean(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step keeps the mean of every channel."""
    family = family_of(node, module)
    if family is not Family.AVERAGE_POOL:
        # timm's DropPath may not scale.
        return family in _SAME_MEAN and getattr(module, "scale_by_keep", True) is not False
    # A pool must average nothing but its input: no zeros, and by no other divisor.
    is_padded = setting(node, module, 3, "padding", 0) not in _UNPADDED
    counts_padding = is_padded and setting(node, module, 5, "count_include_pad", True)
    return not counts_padding and setting(node, module, 6, "divisor_override") is None


def _ends_raw(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether raw input is no longer raw after a step, or does not reach its output."""
    if module is not None:
        home, name = type(module).__module__, type(module).__name__
        is_known = home.startswith("torch.nn.modules.activation") or "Norm" in name
        if is_known or next(module.parameters(), None) is not None:
            return True
    is_attribute = node.op == "call_function" and node.target is getattr
    return (is_attribute and node.args[1] in ATTRIBUTES) or family_of(node, module) in _RAW_ENDS


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
        raise BadValue(f"`{node}` is no rearrangement")
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda other: _compute(other, known, modules)
    )
    call: Any = module or node.target
    if node.op == "call_method":
        call, args = getattr(args[0], str(node.target)), args[1:]
    known[node] = call(*args, **kwargs)
    return known[node]
