"""A compressed model in one file: weights, and a description of what is computed with them.

The file is a safetensors file; the description is JSON in its metadata. Nothing is pickled, and a
description can name only the modules and functions listed here: reading a file runs no code of its.
"""

import inspect
import json
import operator
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from selectconv.errors import CompressionError
from selectconv.files import write_whole
from selectconv.trace.pointwise import Pointwise2d

FORMAT = "selectconv compressed model 1"
_MODULES = {
    kind.__name__: kind
    for kind in (
        Pointwise2d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm,
        nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
        nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid,
        nn.Softmax, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.AvgPool1d, nn.AvgPool2d,
        nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
        nn.AdaptiveMaxPool3d, nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
        nn.ReflectionPad2d, nn.ReplicationPad2d, nn.Flatten, nn.Unflatten, nn.PixelShuffle,
        nn.ChannelShuffle,
    )
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "abs", "add", "adaptive_avg_pool1d", "bmm", "cat", "chunk", "clamp", "concat", "div",
            "exp", "flatten", "index_select", "matmul", "max", "maximum", "mean", "minimum",
            "movedim", "mul", "narrow", "neg", "permute", "pow", "relu", "relu_", "reshape",
            "sigmoid", "softmax", "split", "sqrt", "squeeze", "stack", "sub", "sum", "tanh",
            "transpose", "unbind", "unsqueeze", "zeros_like",
        )
    },
    **{
        f"functional.{name}": getattr(F, name)
        for name in (
            "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
            "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool1d",
            "avg_pool2d", "avg_pool3d", "batch_norm", "celu", "conv1d", "conv2d", "conv3d", "elu",
            "gelu", "group_norm", "hardsigmoid", "hardswish", "hardtanh", "interpolate",
            "layer_norm", "leaky_relu", "linear", "logsigmoid", "max_pool1d", "max_pool2d",
            "max_pool3d", "mish", "normalize", "pad", "relu", "relu6",
            "scaled_dot_product_attention", "selu", "sigmoid", "silu", "softmax", "softplus",
            "softsign", "tanh", "tanhshrink",
        )
    },
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "add", "eq", "floordiv", "getitem", "iadd", "matmul", "mod", "mul", "neg", "pow", "sub",
            "truediv",
        )
    },
    "getattr": getattr,
}  # fmt: skip
_NAMES = {function: name for name, function in reversed(_FUNCTIONS.items())}
_METHODS = frozenset((
    "abs", "add", "chunk", "clamp", "contiguous", "copy_", "dim", "div", "exp", "expand",
    "expand_as", "flatten", "matmul", "max", "mean", "mul", "narrow", "neg", "new_empty", "permute",
    "pow", "relu", "reshape", "sigmoid", "size", "softmax", "split", "sqrt", "squeeze", "sub",
    "sum", "tanh", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
))  # fmt: skip
_ATTRIBUTES = ("shape", "ndim", "dtype", "device")


def save_compressed(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a compressed model: its weights and a description, in one safetensors file.

    The file appears whole or not at all.

    Args:
        module: what `compress` or `load_compressed` returned.
        path: the file to write.

    Raises:
        CompressionError: an operation that a description cannot name, or a path that cannot be
            written.
        TypeError: a module that is not a compressed model.

    Example:
        >>> import tempfile
        >>> import selectconv as sc
        >>> x = torch.randn(2, 3, 8, 8)
        >>> small = sc.compress(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_compressed(small, f"{folder}/small.safetensors")
        ...     again = load_compressed(f"{folder}/small.safetensors")
        >>> bool((again(x) == small(x)).all())
        True
    """
    if not isinstance(module, fx.GraphModule):
        raise TypeError(
            f"`module` must be what sc.compress returned, got {type(module).__name__}; compress it "
            "first."
        )
    description = {"format": FORMAT, **_describe(module)}
    tensors = {}
    for name, tensor in module.state_dict().items():
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    metadata = {"selectconv": json.dumps(description, separators=(",", ":"))}
    from safetensors.torch import save  # `import selectconv` is torch and numpy alone

    content = save(tensors, metadata)
    write_whole(Path(path), lambda file: file.write(content), error=CompressionError, shared=True)


def load_compressed(path: str | os.PathLike[str]) -> fx.GraphModule:
    """Load a compressed model; the source of the original one is not needed.

    Args:
        path: a file of `save_compressed`.

    Returns:
        The model, on the CPU and in evaluation mode.

    Raises:
        CompressionError: not such a file, or a description that does not match its weights.

    Example:
        >>> load_compressed("missing.safetensors")
        Traceback (most recent call last):
        ...
        selectconv.errors.CompressionError: missing.safetensors is not a compressed model: ...
    """
    tensors, description = _read(Path(path))
    try:
        return _rebuild(description, tensors)
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}") from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CompressionError(
            f"{path}: the description cannot be read, or does not match the weights ({reason})."
        ) from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CompressionError(f"{path} is not a compressed model: {reason}.") from error
    try:
        description = json.loads(metadata["selectconv"])
        found = description["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise CompressionError(
            f"{path} is not a compressed model: it holds weights without a description."
        ) from error
    if found != FORMAT:
        raise CompressionError(f"{path} has the format {found!r}; this version reads {FORMAT!r}.")
    return tensors, description


def _describe(module: fx.GraphModule) -> dict[str, Any]:
    """Describe a graph in plain data; unknown operations are refused by name."""
    modules: dict[str, Any] = {}
    steps = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            modules[target] = _describe_module(target, module.get_submodule(target))
        elif node.op == "call_function":
            if node.target not in _NAMES:
                raise CompressionError(_unknown(f"function {node.target!r}"))
            target = _NAMES[node.target]
        elif node.op == "call_method" and target not in _METHODS:
            raise CompressionError(_unknown(f"method {target!r}"))
        steps.append(
            [node.op, node.name, target, _encode(list(node.args)), _encode(dict(node.kwargs))]
        )
    parameters = sorted(name for name, _ in module.named_parameters())
    return {"modules": modules, "parameters": parameters, "steps": steps}


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


def _rebuild(description: dict[str, Any], tensors: dict[str, Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    held: dict[str, Any] = {}
    for name, (kind, settings) in description["modules"].items():
        if kind not in _MODULES:
            raise CompressionError(f"the description names an unknown module, {kind!r}.")
        with torch.device("meta"):  # the weights follow
            held[_check_name(name)] = _MODULES[kind](**_decode(settings, nodes))
    for op, name, target, args, kwargs in description["steps"]:
        if op == "call_function":
            if target not in _FUNCTIONS:
                raise CompressionError(f"the description names an unknown function, {target!r}.")
            function = _FUNCTIONS[target]
        elif op == "call_method":
            if target not in _METHODS:
                raise CompressionError(f"the description names an unknown method, {target!r}.")
        elif op == "get_attr":
            if target not in tensors:
                raise CompressionError(f"the description reads {target!r}, which has no weights.")
            value = tensors[target]
            is_parameter = target in description["parameters"]
            held[target] = nn.Parameter(value) if is_parameter else value
        elif op == "call_module":
            if target not in held:
                raise CompressionError(f"the description calls {target!r}, which it has not.")
        elif op not in ("placeholder", "output"):
            raise CompressionError(f"the description has an unknown kind of step, {op!r}.")
        _check_name(target)
        new_args = tuple(_decode(args, nodes))
        if op == "call_function" and function is getattr and new_args[1] not in _ATTRIBUTES:
            raise CompressionError(f"the description reads the attribute {new_args[1]!r}.")
        nodes[name] = graph.create_node(
            op,
            function if op == "call_function" else target,
            new_args,
            _decode(kwargs, nodes),
            name,
        )
    graph.lint()
    module = fx.GraphModule(held, graph, class_name="Compressed")
    _fill(module, tensors)
    return module.eval()


def _fill(module: fx.GraphModule, tensors: dict[str, Tensor]) -> None:
    """Give a module its weights, after a check that they are all there, and no others."""
    wanted = module.state_dict()
    problems = [f"{name!r} is missing" for name in wanted if name not in tensors]
    problems += [f"{name!r} is not wanted" for name in tensors if name not in wanted]
    problems += [
        f"{name!r} has shape {tuple(tensors[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CompressionError(
            f"the description does not match the weights: {'; '.join(problems[:3])}{more}."
        )
    module.load_state_dict(tensors, assign=True)
    for name, value in module.named_parameters():
        value.requires_grad_(tensors[name].is_floating_point())


def _unknown(what: str) -> str:
    return (
        f"{what} cannot be described in a file without code; save the model's state_dict instead, "
        "or export it with sc.export_onnx."
    )
