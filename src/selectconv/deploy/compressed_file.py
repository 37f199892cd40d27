"""A compressed model in one file: weights, and a description of what is computed with them.

The file is a safetensors file; the description is JSON in its metadata, beside the SHA-256 of both.
Nothing is pickled, and a description can name only what the table of operations holds: building a
graph from one runs no code of the file that it came from.
"""

import hashlib
import inspect
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import resolve_name

from selectconv.checks import check_path
from selectconv.deploy.compress import keep_attributes, plain_attributes
from selectconv.errors import BadType, BadValue, CompressionError
from selectconv.files import write_whole
from selectconv.graph.operations import ATTRIBUTES, TABLE, functions_of

FORMAT = "selectconv compressed model 1"
_MODULES = {kind.__name__: kind for row in TABLE for kind in row.modules}
_METHODS = {name: name for row in TABLE for name in row.names if hasattr(Tensor, name)}
_FUNCTIONS: dict[str, Any] = {
    "getattr": getattr,
    "OrderedDict": OrderedDict,
    **{name: function for row in TABLE for name, function in functions_of(row).items()},
}
_ATTRIBUTES = (*ATTRIBUTES, "T", "mT", "values", "indices")  # the last two: of `topk` and its like
_NAMES: dict[Any, str] = {function: name for name, function in reversed(_FUNCTIONS.items())}
# What a description that was not written by `save_compressed` can lead to.
_UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


def save_compressed(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a compressed model: its weights and a description, in one safetensors file.

    The file appears whole or not at all.

    Args:
        module: what `compress` or `load_compressed` returned.
        path: the file to write.

    Raises:
        CompressionError: the model has an operation that the file format cannot express, or the
            path cannot be written.
        TypeError, ValueError: `module` is not a compressed model, or `path` is not a path.

    Example:
        >>> import tempfile
        >>> import selectconv as sc, torch
        >>> x = torch.randn(2, 3, 8, 8)
        >>> small = sc.compress(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_compressed(small, f"{folder}/small.safetensors")
        ...     again = load_compressed(f"{folder}/small.safetensors")
        >>> bool((again(x) == small(x)).all())
        True
    """
    if not isinstance(module, fx.GraphModule):
        raise BadType(
            f"`module` must be what sc.compress returned, got {type(module).__name__}; compress it "
            "first."
        )
    target = check_path("path", path)
    text = json.dumps({"format": FORMAT, **_describe(module)}, separators=(",", ":"))
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
    }
    metadata = {"selectconv": text, "sha256": _digest(text, tensors)}
    from safetensors.torch import save  # `import selectconv` is torch and numpy alone

    write_whole(target, save(tensors, metadata), error=CompressionError, shared=True)


def load_compressed(path: str | os.PathLike[str]) -> fx.GraphModule:
    """Load a compressed model; the source code of the original model is not needed.

    Args:
        path: a file that `save_compressed` wrote.

    Returns:
        The model, on the CPU and in evaluation mode.

    Raises:
        CompressionError: the file is not a compressed model, is damaged, or its description does
            not match its weights.
        TypeError, ValueError: `path` is not a path.

    Example:
        >>> load_compressed("missing.safetensors")
        Traceback (most recent call last):
        ...
        selectconv.errors.CompressionError: missing.safetensors is not a compressed model: ...
    """
    tensors, text = _read(check_path("path", path))
    try:
        module = _rebuild(json.loads(text), tensors)
        module.load_state_dict(tensors, assign=True)
    except _UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CompressionError(
            f"{path}: the description cannot be read, or does not match the weights ({reason})."
        ) from error
    return module.eval()


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read a file's weights and description, which must be what was saved."""
    from safetensors import SafetensorError, safe_open

    try:
        if os.path.isdir(path):
            raise IsADirectoryError("it is a folder")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, in aligned memory: BLAS rounds differently on parts of the file's own memory.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CompressionError(f"{path} is not a compressed model: {reason}.") from error
    text = metadata.get("selectconv")
    if text is None:
        raise CompressionError(
            f"{path} is not a compressed model: it holds weights without a description."
        )
    if metadata.get("sha256") != _digest(text, tensors):
        raise CompressionError(f"{path} is damaged: it is not what was saved; save it again.")
    return tensors, text


def _digest(description: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all that a file says, whatever the order of its tensors."""
    digest = hashlib.sha256(description.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _describe(module: fx.GraphModule) -> dict[str, Any]:
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
                raise _unknown(f"function `{name}`")
            if node.target is getattr and node.args[1] not in _ATTRIBUTES:
                raise _unknown(f"attribute {node.args[1]!r}")
            target = _NAMES[node.target]
        elif node.op == "call_method" and target not in _METHODS:
            raise _unknown(f"method {target!r}")
        steps.append(
            [node.op, node.name, target, _encode([*node.args]), _encode(dict(node.kwargs))]
        )
    parameters = sorted(name for name, _ in module.named_parameters())
    attributes = _encode(plain_attributes(module))
    return {
        "modules": modules, "parameters": parameters, "steps": steps, "attributes": attributes
    }  # fmt: skip


def _describe_module(name: str, module: nn.Module) -> list[Any]:
    """Describe a module by its class and the arguments with which it is made again.

    Defaults are left out: another version of torch may not know these arguments.
    """
    kind = type(module).__name__
    if _MODULES.get(kind) is not type(module):
        raise _unknown(f"module `{name}` of type {kind}")
    settings = {}
    for key, argument in inspect.signature(type(module)).parameters.items():
        # device, dtype and PReLU's first weights are in the weights
        value = getattr(module, key, argument.default)
        if key == "bias":  # without a weight the argument says nothing
            value = module.bias is not None or module.weight is None
        if value != argument.default:
            settings[key] = value
    return [kind, _encode(settings)]


def _rebuild(description: dict[str, Any], tensors: dict[str, Tensor]) -> fx.GraphModule:
    """Build the graph of a description; its modules have no weights yet.

    Raises:
        LookupError, ValueError: the description names something that is not in the tables.
    """
    if description["format"] != FORMAT:
        raise BadValue(f"it has the format {description['format']!r}, and not {FORMAT!r}")
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    held: dict[str, Any] = {}
    for name, (kind, settings) in description["modules"].items():
        with torch.device("meta"):  # the weights follow
            held[_check_name(name, "-")] = _MODULES[kind](**_decode(settings, nodes))
    known: dict[str, Any] = {
        "call_function": _FUNCTIONS, "call_method": _METHODS,
        "call_module": {name: name for name in held}, "get_attr": {name: name for name in tensors},
    }  # fmt: skip
    for op, name, target, args, kwargs in description["steps"]:
        is_end = op in ("placeholder", "output")
        step: Any = _check_name(target.lstrip("*")) and target if is_end else known[op][target]
        if op == "get_attr":
            value = tensors[_check_name(target, "-")]
            is_parameter = target in description["parameters"]
            held[target] = nn.Parameter(value, value.is_floating_point()) if is_parameter else value
        new_args = tuple(_decode(args, nodes))
        if step is getattr and new_args[1] not in _ATTRIBUTES:
            raise BadValue(f"unknown attribute {new_args[1]!r}")
        nodes[name] = graph.create_node(
            op, step, new_args,
            {_check_name(key): value for key, value in _decode(kwargs, nodes).items()}, name,
        )  # fmt: skip
    graph.lint()
    module = fx.GraphModule(held, graph, class_name="Compressed")
    keep_attributes(module, _decode(description.get("attributes", {"dict": {}}), nodes))
    return module


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": _encode([*value])}
    if isinstance(value, list):
        return [_encode(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(one) for key, one in value.items()}}
    if isinstance(value, slice):
        return {"slice": _encode([value.start, value.stop, value.step])}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _unknown(f"argument {value!r}")


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(one, nodes) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind in ("tuple", "slice"):
        parts = _decode(inner, nodes)
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "dict":
        return {key: _decode(one, nodes) for key, one in inner.items()}
    if kind == "dtype" and isinstance(dtype := getattr(torch, inner), torch.dtype):
        return dtype
    if kind == "ellipsis":
        return Ellipsis
    raise BadValue(f"unknown value {value!r}")


def _check_name(name: str, more: str = "") -> str:
    """Refuse what is not a dotted name: torch.fx writes names into code, those of modules quoted.

    Args:
        name: the name.
        more: what it may have besides letters and digits.
    """
    if not re.fullmatch(rf"[\w{more}]+(\.[\w{more}]+)*", name):
        raise BadValue(f"{name!r} in place of a name")
    return name


def _unknown(what: str) -> CompressionError:
    return CompressionError(
        f"{what} cannot be described in a file without code; save the model's state_dict instead, "
        "or export it with sc.export_onnx."
    )
