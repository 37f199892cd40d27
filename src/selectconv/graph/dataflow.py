"""A model as a list of operations on channels, which counting and compressing share.

The forward is traced with torch.fx on a copy of the model, for an example that shows every shape,
and freed of what changes nothing at inference (dropout, identities) and of writes in place. Each
operation then has one of a few kinds, which say how its output channels depend on its inputs'.
"""

import copy
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers, unwrap
from selectconv.errors import BadType, CompressionError
from selectconv.graph.example import as_arguments, evaluating
from selectconv.graph.operations import (
    Family,
    argument,
    channel_padding,
    concatenated,
    family_of,
    find_module_row,
)
from selectconv.graph.pure_graph import purify, shape_of
from selectconv.graph.tracer import (
    DependsOnValues,
    Fixed,
    ShapeTracer,
    failed_line,
    first_line,
    module_of,
)


class Kind(Enum):
    """How the channels of an operation's output depend on those of its inputs."""

    INPUT = "input"
    OUTPUT = "output"
    CONV = "conv"  # each output channel from all inputs of its group; filters can be removed
    TRANSPOSED = "transposed conv"  # the same, with the weight's axes exchanged
    LINEAR = "linear"  # the same, for features (N, C)
    NORM = "norm"  # channel by channel, with parameters for each; group norm: group by group
    CHANNELWISE = "channelwise"  # channel by channel
    CONCAT = "concat"  # the channels of one input after those of another
    CHANNEL_PAD = "channel pad"  # zero channels before or after the input's
    FLATTEN = "flatten"  # the pixels of one channel after those of another, as features
    TENSOR = "tensor"  # a parameter or buffer of the model
    SHAPE = "shape"  # reads sizes other than the number of channels
    OTHER = "other"  # reads all channels, and keeps its own: compressing leaves it alone


WEIGHTED = (Kind.CONV, Kind.TRANSPOSED, Kind.LINEAR, Kind.NORM)
JOINING = (Kind.CONCAT, Kind.CHANNEL_PAD, Kind.FLATTEN)  # channels of inputs, or zeros
_KIND_OF_OP = {"placeholder": Kind.INPUT, "output": Kind.OUTPUT, "get_attr": Kind.TENSOR}
_CHANNELWISE = {
    Family.ACTIVATION, Family.ARITHMETIC, Family.AVERAGE_POOL, Family.SPATIAL, Family.RESIZE,
    Family.CAST, Family.CONTIGUOUS,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation of a traced model.

    Attributes:
        node: its node in the graph.
        kind: how it treats channels.
        shape: of its output; empty where that is not a tensor.
        macs: its multiply-adds in the dense model, by torch's counter.
        module: the module that it calls, if it calls one.
        name: of that module in the model, also where the model calls a function with its weight.
    """

    node: fx.Node
    kind: Kind
    shape: tuple[int, ...]
    macs: int
    module: nn.Module | None
    name: str = ""

    @property
    def channels(self) -> int:
        """The number of channels of the output; 0 where it has none."""
        return self.shape[1] if len(self.shape) > 1 else 0


@dataclass(frozen=True)
class Dataflow:
    """A model's operations in the order of their execution.

    Attributes:
        root: the traced copy of the model; its parameters are the model's own.
        operations: by node, in order.
    """

    root: fx.GraphModule
    operations: dict[fx.Node, Operation]


def trace_dataflow(model: nn.Module, example_input: Any) -> Dataflow:
    """Trace a model, which is left as it is, and classify what it does in evaluation mode.

    Args:
        model: any model.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        CompressionError: the model cannot be traced, or fails on the example.
        TypeError: `model` is not a module, or the example does not fit its forward.
    """
    model = unwrap(model)
    if isinstance(model, _ConvNd | nn.Linear | _BatchNorm):
        model = nn.Sequential(model)  # a graph needs a parent module
    _check_modules(model)
    args, kwargs = as_arguments(example_input)
    try:
        bound = signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise BadType(f"`example_input` does not fit the model's forward: {error}.") from None
    given = set(bound.arguments)
    bound.apply_defaults()
    # Selective layers are the model's own: what is counted follows their slots.
    layers = selective_layers(model).values()
    root = copy_model(model, (*model.parameters(), *layers))
    for own in set(root.modules()) - set(layers):  # hooks are not part of a plain model
        own._forward_hooks.clear()
        own._forward_pre_hooks.clear()
    with evaluating(root):
        graph = _trace(root, bound.arguments)
        for node in graph.find_nodes(op="placeholder"):  # the graph holds for no other values
            if str(node.target).lstrip("*") not in given and not node.users:
                graph.erase_node(node)
        purify(root, graph)
    traced = fx.GraphModule(root, graph)
    modules, operations = dict(traced.named_modules()), {}
    owners = {
        id(own._parameters.get("weight")): name for name, own in model.named_modules() if name
    }
    for node in graph.nodes:
        module, macs = module_of(modules, node), node.meta["macs"]
        weight = None if module is None else module._parameters.get("weight")
        name = str(node.target) if weight is None else owners.get(id(weight), str(node.target))
        operations[node] = Operation(
            node, classify(node, module), shape_of(node), macs, module, name
        )
    return Dataflow(traced, operations)


def _check_modules(model: nn.Module) -> None:
    """Refuse modules that can be neither copied nor looked into."""
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if isinstance(module, torch.jit.ScriptModule):
            raise CompressionError(
                f"`{name}` is scripted or traced by torch.jit, which hides what it computes: use "
                "the module that it was made from."
            )
        if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks):
            raise CompressionError(
                f"`{name}` has an old-style weight_norm or spectral_norm, a hook that recomputes "
                "its weight: use that of torch.nn.utils.parametrizations, or remove it first."
            )


def copy_model(model: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """Copy a model, except for its `shared` parts, which both then hold.

    Raises:
        CompressionError: it cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(own): own for own in shared})
    except Exception as error:  # a model may hold anything
        raise CompressionError(f"`model` cannot be copied: {first_line(error)}") from error


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module is one step: selective convs, and other packages' dropouts."""
    return isinstance(module, SelectConvNd) or find_module_row(module).family is Family.DROPOUT


def _trace(root: nn.Module, arguments: Mapping[str, Any]) -> fx.Graph:
    """Trace a model for all shapes or, where it depends on them, for those of the example."""
    place = ""
    for fixed in Fixed:
        tracer = ShapeTracer(_is_leaf, arguments, fixed)
        try:
            graph = tracer.trace(root)
            break
        except CompressionError:
            raise
        except Exception as error:  # user code under a tracer can fail in any way
            # torch.fx leaves the module on its stack whose forward failed.
            name, kind = next(reversed(tracer.module_stack.values()), ("", type(root)))
            here = f"`{name}` ({kind.__name__})" if name else f"`{kind.__name__}`"
            line = failed_line(error)
            if fixed is Fixed.ALL or isinstance(error, DependsOnValues):
                raise CompressionError(
                    f"{here} cannot be traced: {first_line(error)}, in {line}. The model itself, "
                    "with its closed slots masked, still works; a part that can be traced, such as "
                    "a backbone, can be given by itself."
                ) from error
            place = place or f"{here} depends on shapes, in {line}"
    if tracer.fixed:
        batch = ", including its batch size" if tracer.fixed is Fixed.ALL else ""
        warn(
            f"{place}: the model was traced for inputs of the example's shapes{batch}, and the "
            "result is only valid for these."
        )
    return graph


def classify(node: fx.Node, module: nn.Module | None) -> Kind:
    """Find the kind of a node; anything that is not exactly as expected is of kind OTHER."""
    if node.op in _KIND_OF_OP:
        return _KIND_OF_OP[node.op]
    if _reads_sizes_only(node):
        return Kind.SHAPE
    before = shape_of(argument(node))
    family = Family.LAYER if isinstance(module, SelectConvNd) else family_of(node, module)
    kind, is_plain = Kind.OTHER, True
    if family in _CHANNELWISE:
        kind, is_plain = Kind.CHANNELWISE, _is_aligned(node)
    elif family is Family.LAYER and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        kind, is_plain = Kind.CONV, len(before) == len(module.kernel_size) + 2
    elif family is Family.LAYER and isinstance(module, _ConvTransposeNd):
        is_plain = len(before) == len(module.kernel_size) + 2 and module.groups == 1
        kind = Kind.TRANSPOSED
    elif type(module) is nn.Linear:
        kind, is_plain = Kind.LINEAR, len(before) == 2
    elif family is Family.NORM and isinstance(module, _BatchNorm):
        kind, is_plain = Kind.NORM, module.track_running_stats
    elif type(module) is nn.GroupNorm:
        kind = Kind.NORM
    elif family is Family.REARRANGE and len(before) > 1:
        kind = _kind_of_rearrangement(node, module, before)
    elif family in (Family.MEAN, Family.EXTREME) and len(before) > 2:
        dim = argument(node, 1, "dim")
        dims = dim if isinstance(dim, list | tuple) else (dim,)
        kind = Kind.CHANNELWISE
        is_plain = all(isinstance(d, int) and d % len(before) > 1 for d in dims)
    elif family is Family.CONCAT:
        kind, is_plain = Kind.CONCAT, concatenated(node, len(shape_of(node)) - 2) is not None
    elif family is Family.PAD:
        added = channel_padding(node, len(before) - 2)
        kind, is_plain = Kind.CHANNEL_PAD if added and any(added) else Kind.CHANNELWISE, bool(added)
    return kind if is_plain else Kind.OTHER


def _kind_of_rearrangement(
    node: fx.Node, module: nn.Module | None, before: tuple[int, ...]
) -> Kind:
    """Find the kind of a step that moves values about."""
    name, after = str(getattr(node.target, "__name__", node.target)), shape_of(node)
    is_by_channel = {
        "squeeze": argument(node, 1, "dim") is not None,
        "unsqueeze": True,
        "getitem": name == "getitem" and _takes_all_channels(node.args[1], len(before)),
        "expand_as": _is_aligned(node),
    }
    if after[:2] == before[:2] and is_by_channel.get(name, False):
        return Kind.CHANNELWISE
    is_flat = name in ("flatten", "reshape", "view") or type(module) is nn.Flatten
    return Kind.FLATTEN if is_flat and after == (before[0], prod(before[1:])) else Kind.OTHER


def _takes_all_channels(item: Any, axes: int) -> bool:
    """Return whether an index into a value with so many axes takes all channels as they are."""
    items = item if isinstance(item, tuple) else (item,)
    missing = (slice(None),) * (axes - sum(one is not None and one is not ... for one in items))
    place = items.index(...) if ... in items else len(items)
    whole = (*items[:place], *missing, *items[place + 1 :])
    return whole[:2] == (slice(None), slice(None))


def is_channel_operand(flow: Dataflow, op: Operation, other: fx.Node) -> bool:
    """Return whether an input of a channelwise operation has a channel for each of its outputs."""
    shape = flow.operations[other].shape
    can_broadcast = len(op.node.all_input_nodes) > 1
    return shape[1:2] == op.shape[1:2] and (len(shape) == len(op.shape) or not can_broadcast)


def joined(flow: Dataflow, op: Operation) -> Iterator[tuple[fx.Node, slice, int]]:
    """Yield the inputs of an operation that joins channels, and where these stand in its output.

    The last number says how often each of them stands there: once for each pixel that is flattened.
    """
    inputs, start, pixels = [argument(op.node)], 0, 1
    if op.kind is Kind.CONCAT:
        inputs = argument(op.node, 0, "tensors")
    elif op.kind is Kind.CHANNEL_PAD:
        start = argument(op.node, 1, "pad")[-2]
    else:
        pixels = op.channels // flow.operations[inputs[0]].channels
    for other in inputs:
        stop = start + flow.operations[other].channels * pixels
        yield other, slice(start, stop), pixels
        start = stop


def find_shared(flow: Dataflow) -> set[fx.Node]:
    """Find the operations whose parameters another operation has as well."""
    held = {
        node: [id(parameter) for parameter in op.module.parameters(recurse=False)]
        for node, op in flow.operations.items()
        if op.module is not None
    }
    owners = Counter(key for keys in held.values() for key in keys)
    return {node for node, keys in held.items() if any(owners[key] > 1 for key in keys)}


def _is_aligned(node: fx.Node) -> bool:
    """Return whether the channels of all operands are the output's, or are broadcast over them."""
    out = shape_of(node)
    if len(out) < 2:
        return False
    for other in node.all_input_nodes:
        shape = shape_of(other)
        can_narrow = len(shape) == len(out) or other.op == "get_attr"  # as (C, 1, 1): parameters
        size = ((1,) * len(out) + shape)[1 - len(out)]  # along the output's channels
        if size != 1 and not (can_narrow and size == out[1]):
            return False
    return True


def _reads_sizes_only(node: fx.Node) -> bool:
    """Return whether a node reads sizes of a tensor, none of which is its number of channels."""
    is_attribute = node.op == "call_function" and node.target is getattr
    if not is_attribute and node.op != "call_method":
        return False
    name, dim = (node.args[1], None) if is_attribute else (node.target, argument(node, 1, "dim"))
    items = [dim] if dim is not None else [
        user.args[1] if user.target is operator.getitem else slice(None) for user in node.users
    ]  # fmt: skip
    axes = range(len(shape_of(argument(node))))
    return name in ("dim", "ndimension", "ndim", "dtype", "device") or (
        name in ("shape", "size") and not any(_has_channels(axes, item) for item in items)
    )


def _has_channels(axes: range, item: Any) -> bool:
    """Return whether an item of a shape, a number or a slice, may be the number of channels."""
    try:
        found = axes[item]
    except TypeError:  # it is computed as the model runs
        return True
    return 1 in found if isinstance(found, range) else found == 1
