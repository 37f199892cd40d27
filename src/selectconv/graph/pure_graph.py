"""A traced graph freed of what changes nothing at inference, and of writes in place."""

import operator
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from selectconv.errors import CompressionError
from selectconv.graph.operations import IN_PLACE_OPERATORS, Family, argument, family_of, writes
from selectconv.graph.tracer import module_of

_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_LAYERS: dict[Any, Any] = {
    F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d, F.linear: nn.Linear
}  # fmt: skip
# The arguments of functions that have modules, after the input: tensors, and settings.
_CONV_ARGUMENTS = (
    ("weight", "bias"), {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
)  # fmt: skip
_ARGUMENTS: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {
    F.batch_norm: (
        ("running_mean", "running_var", "weight", "bias"),
        {"training": False, "momentum": 0.1, "eps": 1e-5},
    ),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONV_ARGUMENTS),
    F.linear: (("weight", "bias"), {}),
}
_DROPOUTS = {Family.DROPOUT, Family.ALPHA_DROPOUT}


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a traced value on the example; empty where it is not a tensor."""
    value = node.meta.get("value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def purify(root: nn.Module, graph: fx.Graph) -> None:
    """Rewrite a model that `ShapeTracer` traced as functions of values, without writes."""
    modules = dict(root.named_modules())
    made: dict[Any, str] = {}
    for node in list(graph.nodes):
        if _is_inert(node, module_of(modules, node)):
            node.replace_all_uses_with(argument(node))
        elif node.op == "call_function" and node.target in _ARGUMENTS:
            _call_module(root, node, made)
        elif str(getattr(node.target, "__name__", node.target)) in ("view", "reshape"):
            _leave_out_sizes(node)
    _drop_writes(graph, modules)
    for node in graph.nodes:
        if family_of(node, None) is Family.COPY:  # nobody writes any more
            node.replace_all_uses_with(argument(node))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _is_inert(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a node returns its input at inference."""
    family = family_of(node, module)
    if family in _DROPOUTS and node.op == "call_function":
        # `training` is a plain bool where the module passed its own flag.
        return argument(node, 2, "training", True) is False
    return family is Family.IDENTITY or family in _DROPOUTS


def _leave_out_sizes(node: fx.Node) -> None:
    """Rewrite a view that flattens maps, or adds axes of size 1, so that it names no channels."""
    before, after = shape_of(x := argument(node)), shape_of(node)
    call: tuple[Any, ...] = ()
    if len(before) > 2 and after == (before[0], prod(before[1:])):
        call = torch.flatten, (x, 1)
    elif len(before) == 2 and after[:2] == before and set(after[2:]) == {1}:
        call = operator.getitem, (x, (slice(None), slice(None), *[None] * (len(after) - 2)))
    if call:
        node.op, node.target, node.args, node.kwargs = "call_function", *call, {}


def _call_module(root: nn.Module, node: fx.Node, made: dict[Any, str]) -> None:
    """Let a module do what a functional conv or batch norm does: its channels can be removed.

    Nothing is changed where the function reads anything but parameters and buffers of the model.
    """
    names, defaults = _ARGUMENTS[node.target]
    settings = {
        name: argument(node, 1 + len(names) + i, name, default)
        for i, (name, default) in enumerate(defaults.items())
    }
    read = {name: argument(node, 1 + i, name) for i, name in enumerate(names)}
    read = {name: arg for name, arg in read.items() if arg is not None}
    if node.all_input_nodes[1:] != [arg for arg in read.values() if arg.op == "get_attr"]:
        return
    state = {name: operator.attrgetter(str(arg.target))(root) for name, arg in read.items()}
    module: nn.Module
    if node.target is F.batch_norm:
        if settings.pop("training") or len(state) < len(names):
            return
        module = _NORMS[len(shape_of(node))](len(state["bias"]), **settings)
    else:
        if not all(isinstance(value, nn.Parameter) for value in state.values()):
            return
        out_channels, inputs, *kernel_size = state["weight"].shape
        settings["bias"] = "bias" in state
        kernel = [kernel_size] if kernel_size else []  # a linear layer has none
        in_channels = inputs * settings.get("groups", 1)
        with torch.device("meta"):
            module = _LAYERS[node.target](in_channels, out_channels, *kernel, **settings)
    for name, value in state.items():
        setattr(module, name, value)
    # One that is called twice has one name.
    key = (node.target, str(settings), *(arg.target for arg in read.values()))
    node.op, node.target = "call_module", made.setdefault(key, f"_{node.name}")
    node.args, node.kwargs = (argument(node),), {}
    root.add_module(node.target, module.eval())


def _drop_writes(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Replace each write in place by a new value, which all later readers read.

    A write into a view is not seen by those who read the whole: `compress` then finds that the
    outputs differ.
    """
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        module, written = module_of(modules, node), argument(node)
        if not writes(node, module):
            continue
        if module is None:
            _make_functional(node)
        if isinstance(written, fx.Node) and isinstance(written.meta["value"], Tensor):
            for user in set(written.users) & set(nodes[place + 1 :]):
                user.replace_input_with(written, node)
    for module in modules.values():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]


def _make_functional(node: fx.Node) -> None:
    """Turn a call that writes into its input into one that does not."""
    if "inplace" in node.kwargs:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return
    name = str(getattr(node.target, "__name__", node.target)).removesuffix("_")
    homes = (Tensor,) if node.op == "call_method" else (torch, F)
    functions = [getattr(home, name) for home in homes if hasattr(home, name)]
    if node.target in IN_PLACE_OPERATORS:
        functions = [IN_PLACE_OPERATORS[node.target]]
    if not functions:
        raise CompressionError(
            f"`{node.name}` writes in place in a way that is not known; write it out of place to "
            "compress the model. Uncompressed, with masked slots, it still works."
        )
    node.target = name if node.op == "call_method" else functions[0]
