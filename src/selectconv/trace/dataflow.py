"""A model as a list of operations on channels, which counting and compressing share.

The forward is traced with torch.fx on a copy of the model, freed of what changes nothing at
inference (dropout, identities) and of writes in place, and run once to see every shape. Each
operation then has one of a few kinds, which say how its output channels depend on its inputs'.
"""

import copy
import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from selectconv.core.layer import SelectConvNd
from selectconv.errors import CompressionError
from selectconv.trace.example import as_arguments, evaluating
from selectconv.trace.kinds import CONVS, NORMS, Kind, classify
from selectconv.trace.pure_graph import drop_inert, drop_writes


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
        root: a copy of the model that owns the modules; parameters are the model's own.
        operations: by node, in order.
        macs: multiply-adds of one run of the dense model, by torch's counter.
    """

    root: nn.Module
    operations: dict[fx.Node, Operation]
    macs: int

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    if isinstance(model, (*CONVS, nn.Linear, *NORMS)):
        model = nn.Sequential(model)  # a graph needs someone to own its modules
    # Selective layers are the model's own: what is counted follows their slots.
    layers = [module for module in model.modules() if isinstance(module, SelectConvNd)]
    if not all(layer.is_whole for layer in layers):
        raise CompressionError(
            "`model` selects channels before batch norm (placement='before-norm'), which can be "
            "neither compressed nor counted: build it with placement='input'."
        )
    memo: dict[int, Any] = {id(own): own for own in (*model.parameters(), *layers)}
    root = copy.deepcopy(model, memo)
    with evaluating(root):
        return _trace_copy(root, model, example_input)


def _trace_copy(root: nn.Module, model: nn.Module, example_input: Any) -> Dataflow:
    graph = _trace(root, model)
    drop_inert(graph, root)
    drop_writes(graph, root)
    for node in graph.find_nodes(op="call_method", target="clone"):  # nobody writes any more
        node.replace_all_uses_with(node.args[0])
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    args, kwargs = as_arguments(example_input)
    recorder = _Recorder(fx.GraphModule(root, graph))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            recorder.run(*_positional(graph, args, kwargs))
    except Exception as error:
        reason = str(error).split("\n\nWhile executing")[0].strip()
        raise CompressionError(f"`example_input`: the model fails on it with {reason}") from error
    modules = dict(root.named_modules())
    operations = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        shape = recorder.shapes.get(node, ())
        kind = classify(node, module, recorder.shapes)
        operations[node] = Operation(node, kind, shape, module)
    return Dataflow(root, operations, int(counter.get_total_flops()) // 2)


class _Tracer(fx.Tracer):
    """Traces into everything but torch's own modules and selective layers, and knows where it is.

    Attributes:
        inside: names of the modules whose forward is under way, outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SelectConvNd) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.inside.append(self.path_of_module(m))
        out = super().call_module(m, forward, args, kwargs)
        self.inside.pop()  # left in place by an exception: there it says where
        return out


def _trace(root: nn.Module, model: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    try:
        return tracer.trace(root)
    except Exception as error:  # user code under a tracer can fail in any way
        name = tracer.inside[-1] if tracer.inside else ""
        module = root.get_submodule(name)
        where = f"`{name}` ({type(module).__name__})" if name else f"`{type(model).__name__}`"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CompressionError(
            f"{where} cannot be traced: {reason} Its forward must not depend on values; the model "
            "itself, with its closed slots masked, still works."
        ) from error


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the shapes of all tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
        return value


def _positional(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Order the arguments as the graph's inputs; those with a default may be left out."""
    values = list(args)
    for node in [node for node in graph.nodes if node.op == "placeholder"][len(args) :]:
        name = str(node.target).lstrip("*")
        if name in kwargs:
            values.append(kwargs[name])
        elif node.args:
            values.append(node.args[0])
        else:
            raise CompressionError(f"`example_input` lacks {name!r}, which the model takes.")
    return tuple(values)
