"""How the channels of an operation's output depend on those of its inputs: a few kinds.

What is of no known kind reads all channels and keeps its own: compressing leaves it alone.
"""

import operator
from enum import Enum
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core.layer import SelectConvNd

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# What computes each channel of its output from the same channel of its input, and nothing else.
_CHANNELWISE_MODULES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad2d,
    nn.ReplicationPad2d,
)  # fmt: skip
_CHANNELWISE_FUNCTIONS = (
    F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid,
    F.mish, F.relu, F.relu6, F.selu, F.silu, F.sigmoid, F.softplus, F.softsign, F.tanh,
    F.tanhshrink, torch.relu, torch.selu, torch.sigmoid, torch.tanh, torch.clamp, torch.abs,
    torch.neg, torch.exp, torch.sqrt, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.max_pool1d,
    F.max_pool2d, F.max_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
    F.interpolate, torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
)  # fmt: skip
_CHANNELWISE_METHODS = (
    "relu", "sigmoid", "tanh", "clamp", "abs", "neg", "exp", "sqrt", "add", "sub", "mul", "div",
    "contiguous",
)  # fmt: skip
_CONCATS = (torch.cat, torch.concat, torch.concatenate)


class Kind(Enum):
    """How the channels of an operation's output depend on those of its inputs."""

    INPUT = "input"
    OUTPUT = "output"
    CONV = "conv"  # each output channel from all inputs of its group; filters can be removed
    LINEAR = "linear"  # the same, for features (N, C)
    NORM = "norm"  # channel by channel, with parameters for each
    CHANNELWISE = "channelwise"  # channel by channel
    CONCAT = "concat"  # the channels of one input after those of another
    CHANNEL_PAD = "channel pad"  # zero channels before or after the input's
    TENSOR = "tensor"  # a parameter or buffer of the model
    SHAPE = "shape"  # reads sizes other than the number of channels
    OTHER = "other"  # reads all channels, and keeps its own


def classify(
    node: fx.Node, module: nn.Module | None, shapes: dict[fx.Node, tuple[int, ...]]
) -> Kind:
    """Find the kind of a node; anything that is not exactly as expected is of kind OTHER."""
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    if node.op == "get_attr":
        return Kind.TENSOR
    if _reads_sizes_only(node):
        return Kind.SHAPE
    shape = shapes.get(node, ())
    before = argument(node, 0, "input")
    before_shape = shapes.get(before, ()) if isinstance(before, fx.Node) else ()
    if isinstance(module, SelectConvNd) or type(module) in CONVS:
        assert isinstance(module, nn.modules.conv._ConvNd)
        return Kind.CONV if len(before_shape) == len(module.kernel_size) + 2 else Kind.OTHER
    if type(module) is nn.Linear:
        return Kind.LINEAR if len(before_shape) == 2 else Kind.OTHER
    if type(module) in NORMS:
        norm = cast(_BatchNorm, module)
        return Kind.NORM if norm.track_running_stats else Kind.OTHER
    if node.op == "call_function" and node.target in _CONCATS:
        tensors = argument(node, 0, "tensors")
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        is_plain = isinstance(tensors, list | tuple) and dim in (1, 1 - len(shape))
        return Kind.CONCAT if is_plain else Kind.OTHER
    if node.op == "call_function" and node.target is F.pad:
        return _classify_pad(node, before_shape)
    if is_spatial_mean(node, before_shape):
        return Kind.CHANNELWISE
    if (
        type(module) in _CHANNELWISE_MODULES
        or (node.op == "call_function" and node.target in _CHANNELWISE_FUNCTIONS)
        or (node.op == "call_method" and node.target in _CHANNELWISE_METHODS)
    ):
        inputs = [shapes.get(other, ()) for other in node.all_input_nodes]
        if len(shape) >= 2 and all(is_aligned(one, shape) for one in inputs):
            return Kind.CHANNELWISE
    return Kind.OTHER


def is_aligned(one: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Tell whether an operand's channels are those of the output, or are broadcast over them."""
    if len(one) < len(out):  # a scalar or, as (C, 1, 1), a parameter with leading axes left out
        return len(one) < len(out) - 1 or one[0] in (1, out[1])
    return len(one) == len(out) and one[1] in (1, out[1])


def _reads_sizes_only(node: fx.Node) -> bool:
    """Tell whether a node reads sizes of a tensor, none of which is its number of channels."""
    if node.op == "call_method" and node.target in ("size", "dim", "ndimension"):
        return node.target != "size" or argument(node, 1, "dim") in (0, 2, 3, 4)
    if node.op == "call_function" and node.target is getattr:
        if node.args[1] in ("ndim", "dtype", "device"):
            return True
        items = [user.args[1] for user in node.users if user.target is operator.getitem]
        is_safe = len(items) == len(node.users) and all(
            item in (0, 2, 3, 4) or item in (slice(2, None, None), slice(-2, None, None))
            for item in items
        )
        return node.args[1] == "shape" and is_safe
    return False


def _classify_pad(node: fx.Node, before: tuple[int, ...]) -> Kind:
    pad = argument(node, 1, "pad")
    mode = argument(node, 2, "mode", "constant")
    value = argument(node, 3, "value")
    if not isinstance(pad, list | tuple) or not all(isinstance(size, int) for size in pad):
        return Kind.OTHER
    spatial = 2 * (len(before) - 2)
    if len(pad) <= spatial:
        return Kind.CHANNELWISE
    is_plain = len(pad) == spatial + 2 and min(pad[-2:]) >= 0
    if is_plain and mode == "constant" and value in (None, 0, 0.0):
        return Kind.CHANNEL_PAD
    return Kind.OTHER


def is_spatial_mean(node: fx.Node, before: tuple[int, ...]) -> bool:
    """Tell whether a node takes means over spatial axes of an input of this shape."""
    is_mean = (node.op == "call_method" and node.target == "mean") or node.target is torch.mean
    if not is_mean or len(before) < 3:
        return False
    dim = argument(node, 1, "dim")
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return all(isinstance(d, int) and d % len(before) >= 2 for d in dims)


def argument(node: fx.Node, place: int, keyword: str, default: Any = None) -> Any:
    """Read an argument of a call by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)
