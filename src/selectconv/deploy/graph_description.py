"""A graph of torch's operations as plain data, and back.

A description can name only what the table of operations holds: building a graph from one runs no
code of the file that it came from.
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import resolve_name

from selectconv.errors import CompressionError
from selectconv.graph.operations import ATTRIBUTES, TABLE, functions_of

_MODULES = {kind.__name__: kind for row in TABLE for kind in row.modules}
_METHODS = {name for row in TABLE for name in row.names if hasattr(Tensor, name)}
_FUNCTIONS: dict[str, Any] = {"getattr": getattr}
for _row in TABLE:
    _FUNCTIONS |= functions_of(_row)
_NAMES: dict[Any, str] = {function: name for name, function in reversed(_FUNCTIONS.items())}


def describe_graph(module: fx.GraphModule) -> dict[str, Any]:
    """Describe a graph in plain data.

    Raises:
        CompressionError: an operation that the table does not have; the message names it.
    """
    modules: dict[str, Any] = {}
    steps = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            modules[target] = _describe_module(target, module.get_submodule(target))
        elif node.op == "call_function":
            if node.target not in _NAMES:
                name = resolve_name(node.target) or getattr(node.target, "__name__", node.target)
                raise CompressionError(_unknown(f"function `{name}`"))
            target = _NAMES[node.target]
        elif node.op == "call_method" and target not in _METHODS:
            raise CompressionError(_unknown(f"method {target!r}"))
        steps.append(
            [node.op, node.name, target, _encode(list(node.args)), _encode(dict(node.kwargs))]
        )
    parameters = sorted(name for name, _ in module.named_parameters())
    return {"modules": modules, "parameters": parameters, "steps": steps}


def rebuild_graph(description: dict[str, Any], tensors: dict[str, Tensor]) -> fx.GraphModule:
    """Build the graph of a description; its modules have no weights yet.

    Args:
        description: of `describe_graph`.
        tensors: the weights, of which the graph holds those that it reads itself.

    Raises:
        CompressionError: the description holds something unknown; the message names it.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    held: dict[str, Any] = {}
    for name, (kind, settings) in description["modules"].items():
        if kind not in _MODULES:
            raise CompressionError(f"the description names an unknown module, {kind!r}.")
        with torch.device("meta"):  # the weights follow
            held[_check_name(name)] = _MODULES[kind](**_decode(settings, nodes))
    for op, name, target, args, kwargs in description["steps"]:
        if op == "get_attr":
            if target not in tensors:
                raise CompressionError(f"the description reads {target!r}, which has no weights.")
            value = tensors[target]
            is_parameter = target in description["parameters"]
            held[target] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        step = _find_target(op, target, held)
        new_args = tuple(_decode(args, nodes))
        if step is getattr and new_args[1] not in ATTRIBUTES:
            raise CompressionError(f"the description reads the attribute {new_args[1]!r}.")
        nodes[name] = graph.create_node(op, step, new_args, _decode(kwargs, nodes), name)
    graph.lint()
    return fx.GraphModule(held, graph, class_name="Compressed")


def _find_target(op: str, target: str, held: dict[str, Any]) -> Any:
    """Check what a step names, and look up the function that it calls."""
    if op == "call_function":
        if target not in _FUNCTIONS:
            raise CompressionError(f"the description names an unknown function, {target!r}.")
        return _FUNCTIONS[target]
    if op == "call_method" and target not in _METHODS:
        raise CompressionError(f"the description names an unknown method, {target!r}.")
    if op == "call_module" and target not in held:
        raise CompressionError(f"the description calls {target!r}, which it does not define.")
    if op not in ("call_method", "call_module", "get_attr", "placeholder", "output"):
        raise CompressionError(f"the description has an unknown kind of step, {op!r}.")
    _check_name(target.lstrip("*") if op == "placeholder" else target)
    return target


def _describe_module(name: str, module: nn.Module) -> list[Any]:
    kind = type(module).__name__
    if _MODULES.get(kind) is not type(module):
        raise CompressionError(_unknown(f"module `{name}` of type {kind}"))
    return [kind, _encode(_settings(module))]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Read the arguments with which a standard module is made again."""
    settings = {}
    for name in inspect.signature(type(module)).parameters:
        if name == "bias":
            settings[name] = module.bias is not None
        elif hasattr(module, name):  # device, dtype and PReLU's first weights are in the weights
            settings[name] = getattr(module, name)
    return settings


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encode(one) for one in value]}
    if isinstance(value, list):
        return [_encode(one) for one in value]
    if isinstance(value, dict):
        return {"dict": {str(key): _encode(one) for key, one in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(one) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CompressionError(_unknown(f"argument {value!r}"))


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(one, nodes) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind == "tuple":
        return tuple(_decode(one, nodes) for one in inner)
    if kind == "dict":
        return {_check_name(key): _decode(one, nodes) for key, one in inner.items()}
    if kind == "slice":
        return slice(*(_decode(one, nodes) for one in inner))
    if kind == "dtype":
        dtype = getattr(torch, inner)
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind == "ellipsis":
        return Ellipsis
    raise CompressionError(f"the description holds an unknown kind of value, {kind!r}.")


def _check_name(name: str) -> str:
    """Refuse what is not a dotted name: torch.fx writes names into code."""
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise CompressionError(f"the description holds {name!r} in place of a name.")
    return name


def _unknown(what: str) -> str:
    return (
        f"{what} cannot be described in a file without code; save the model's state_dict instead, "
        "or export it with sc.export_onnx."
    )
