"""A model as a list of operations on channels, which counting and compressing share.

The forward is traced with torch.fx on a copy of the model, run once to see every shape, and freed
of what changes nothing at inference (dropout, identities) and of writes in place. Each operation
then has one of a few kinds, which say how its output channels depend on its inputs'.
"""

import copy
import inspect
import io
import operator
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.flop_counter import FlopCounterMode

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers, unwrap
from selectconv.errors import CompressionError
from selectconv.graph.example import (
    as_arguments,
    check_fits,
    evaluating,
    settled_arguments,
)
from selectconv.graph.fixed_shapes import DependsOnValues, FixedShapeTracer, failed_line
from selectconv.graph.kinds import Kind, classify, shape_of
from selectconv.graph.pure_graph import purify
from selectconv.graph.tracer import Tracer, first_line, module_of


@dataclass(frozen=True)
class Operation:
    """One operation of a traced model.

    Attributes:
        node: its node in the graph.
        kind: how it treats channels.
        shape: of its output; empty where that is not a tensor.
        module: the module that it calls, if it calls one.
    """

    node: fx.Node
    kind: Kind
    shape: tuple[int, ...] = ()
    module: nn.Module | None = None

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
        macs: by node, its multiply-adds in the dense model, by torch's counter.
    """

    root: fx.GraphModule
    operations: dict[fx.Node, Operation]
    macs: dict[fx.Node, int]

    def tensor(self, node: fx.Node) -> Tensor:
        """Look up the parameter or buffer that a node of kind TENSOR stands for."""
        return cast(Tensor, operator.attrgetter(str(node.target))(self.root))


def trace_dataflow(model: nn.Module, example_input: Any) -> Dataflow:
    """Trace a model, which is left as it is, and classify what it does in evaluation mode.

    Args:
        model: any model.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        CompressionError: the model cannot be traced, or fails on the example.
        TypeError: `model` is not a module.
    """
    model = unwrap(model)
    if isinstance(model, _ConvNd | nn.Linear | _BatchNorm):
        model = nn.Sequential(model)  # a graph needs a parent module
    # Selective layers are the model's own: what is counted follows their slots.
    layers = selective_layers(model).values()
    args, kwargs = as_arguments(example_input)
    check_modules(model)
    root = copy_model(model, (*model.parameters(), *layers))
    with evaluating(root):
        traced = fx.GraphModule(root, _trace(root, args, kwargs))
        inputs = _positional(traced.graph, args, kwargs)
        check_fits(root, args, kwargs)
        macs = _run_and_purify(traced, root, inputs)
    modules = {node: module_of(traced, node) for node in traced.graph.nodes}
    operations = {
        node: Operation(node, classify(node, module), shape_of(node), module)
        for node, module in modules.items()
    }
    return Dataflow(traced, operations, macs)


class _Observer(ShapeProp):
    """Runs a graph once, and notes the shape and the multiply-adds of each node."""

    def observe(self, inputs: tuple[Any, ...]) -> dict[fx.Node, int]:
        self.macs: dict[fx.Node, int] = {}
        with torch.no_grad(), FlopCounterMode(display=False) as self.counter:
            self.propagate(*inputs)
        return self.macs

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        self.macs[n] = int(self.counter.get_total_flops() - before) // 2
        return value


def _run_and_purify(
    traced: fx.GraphModule, root: nn.Module, inputs: tuple[Any, ...]
) -> dict[fx.Node, int]:
    """Note shapes and multiply-adds, and drop what changes nothing; return the multiply-adds."""
    try:
        with redirect_stderr(io.StringIO()):  # ShapeProp prints what it raises
            macs = _Observer(traced).observe(inputs)
    except Exception as error:
        reason = str(error.__cause__ or error).split("\n\nWhile executing")[0].strip()
        raise CompressionError(f"`example_input`: the model fails on it with {reason}") from error
    purify(traced, root)  # which changes and drops nodes, and adds none
    return {node: macs[node] for node in traced.graph.nodes}


def check_modules(model: nn.Module) -> None:
    """Refuse modules that can be neither copied nor looked into.

    Raises:
        CompressionError: there is one; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CompressionError(
                f"`{name}` is scripted or traced by torch.jit, which hides what it computes: use "
                "the module that it was made from."
            )
        hooks = module._forward_pre_hooks.values()
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


def _trace(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Graph:
    """Trace a model for all shapes or, where it depends on them, for those of the example."""
    settled = settled_arguments(root, args, kwargs)
    tracer = Tracer(_is_selective, settled)
    try:
        return _without(tracer.trace(root), settled, args, kwargs)
    except Exception as error:  # user code under a tracer can fail in any way
        place = f"{_describe_place(root, tracer)} depends on shapes"
        if line := failed_line(error):
            place += f", in {line}"
    graph, keeps_batch = _trace_example(root, args, kwargs)
    warn(
        f"{place}: the model was traced for inputs of the example's shapes"
        f"{'' if keeps_batch else ', including its batch size'}, and the result is only valid for "
        "these."
    )
    return _without(graph, settled, args, kwargs)


def _without(
    graph: fx.Graph, settled: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Graph:
    """Drop settled arguments that the example leaves out: the graph holds for no other values."""
    for node in graph.find_nodes(op="placeholder")[len(args) :]:
        is_settled = node.target in settled and node.target not in kwargs
        if (is_settled or str(node.target).startswith("*")) and not node.users:
            graph.erase_node(node)
    return graph


def _trace_example(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Graph, bool]:
    """Trace a model for the shapes of its example; return also whether batches are free."""
    try:
        bound = inspect.signature(root.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CompressionError(f"`example_input`: the model fails on it with {error}") from error
    bound.apply_defaults()
    for keeps_batch in (True, False):
        tracer = FixedShapeTracer(_is_selective, bound.arguments, keeps_batch=keeps_batch)
        try:
            return tracer.trace(root), tracer.keeps_batch
        except Exception as error:  # user code under a tracer can fail in any way
            if not keeps_batch or isinstance(error, DependsOnValues):
                raise _refusal(root, tracer, error) from error
    raise AssertionError("the last try returns or raises")


def _refusal(root: nn.Module, tracer: Tracer, error: Exception) -> CompressionError:
    """Say in one line why a model cannot be traced."""
    line = failed_line(error)
    if isinstance(error, DependsOnValues):
        reason = f"{line or error} depends on the values of a tensor"
    else:
        reason = first_line(error).rstrip(".") + (f", in {line}" if line else "")
    return CompressionError(
        f"{_describe_place(root, tracer)} cannot be traced: {reason}. The model itself, with its "
        "closed slots masked, still works."
    )


def _is_selective(module: nn.Module) -> bool:
    return isinstance(module, SelectConvNd)


def _describe_place(root: nn.Module, tracer: Tracer) -> str:
    """Name the module in which tracing failed."""
    inside = tracer.inside[-1] if tracer.inside else ""
    kind = type(root.get_submodule(inside)).__name__
    return f"`{inside}` ({kind})" if inside else f"`{kind}`"


def _positional(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Order the arguments as the graph's inputs; those with a default may be left out."""
    values = list(args)
    for node in graph.find_nodes(op="placeholder")[len(args) :]:
        name = str(node.target).lstrip("*")
        if name in kwargs:
            values.append(kwargs[name])
        elif node.args:
            values.append(node.args[0])
        else:
            raise CompressionError(f"`example_input` lacks {name!r}, which the model takes.")
    return tuple(values)
