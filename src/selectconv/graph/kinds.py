"""How the channels of an operation's output depend on those of its inputs: a few kinds.

What is of no known kind reads all channels and keeps its own: compressing leaves it alone.
"""

import operator
from enum import Enum
from typing import Any

from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata

from selectconv.core.layer import SelectConvNd
from selectconv.graph.operations import Family, argument, family_of

_CHANNELWISE = {
    Family.ACTIVATION, Family.ARITHMETIC, Family.AVERAGE_POOL, Family.ADAPTIVE_AVERAGE_POOL,
    Family.MAX_POOL, Family.RESIZE, Family.SPATIAL_PAD, Family.CAST, Family.CONTIGUOUS,
}  # fmt: skip


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


_KIND_OF_OP = {"placeholder": Kind.INPUT, "output": Kind.OUTPUT, "get_attr": Kind.TENSOR}


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape that torch.fx's ShapeProp noted; empty where there is no tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return tuple(meta.shape) if isinstance(meta, TensorMetadata) else ()


def classify(node: fx.Node, module: nn.Module | None) -> Kind:
    """Find the kind of a node; anything that is not exactly as expected is of kind OTHER."""
    if node.op in _KIND_OF_OP:
        return _KIND_OF_OP[node.op]
    if _reads_sizes_only(node):
        return Kind.SHAPE
    family = Family.CONV if isinstance(module, SelectConvNd) else family_of(node, module)
    if family in _CHANNELWISE:
        return Kind.CHANNELWISE if _is_aligned(node) else Kind.OTHER
    before = shape_of(argument(node))
    if family is Family.CONV:
        assert isinstance(module, nn.modules.conv._ConvNd)
        is_plain = len(before) == len(module.kernel_size) + 2
        # A hook may return something else.
        return Kind.CONV if is_plain and shape_of(node)[1] == module.out_channels else Kind.OTHER
    if family is Family.LINEAR:
        return Kind.LINEAR if len(before) == 2 else Kind.OTHER
    if family is Family.NORM:
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        return Kind.NORM if module.track_running_stats else Kind.OTHER
    if family is Family.MEAN:
        return Kind.CHANNELWISE if _is_spatial_mean(node) else Kind.OTHER
    if family is Family.CONCAT:
        tensors = argument(node, 0, "tensors")
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        is_plain = isinstance(tensors, list | tuple) and dim in (1, 1 - len(shape_of(node)))
        return Kind.CONCAT if is_plain else Kind.OTHER
    return _classify_pad(node, before) if family is Family.PAD else Kind.OTHER


def _is_aligned(node: fx.Node) -> bool:
    """Return whether the channels of all operands are the output's, or are broadcast over them."""
    out = shape_of(node)
    if len(out) < 2:
        return False
    for other in node.all_input_nodes:
        shape = shape_of(other)
        if len(shape) == len(out):
            is_fine = shape[1] in (1, out[1])
        elif len(shape) == len(out) - 1:  # as (C, 1, 1): compressing narrows parameters only
            is_fine = shape[0] == 1 or (shape[0] == out[1] and other.op == "get_attr")
        else:
            is_fine = len(shape) < len(out)
        if not is_fine:
            return False
    return True


def _reads_sizes_only(node: fx.Node) -> bool:
    """Return whether a node reads sizes of a tensor, none of which is its number of channels."""
    is_attribute = node.op == "call_function" and node.target is getattr
    name = node.args[1] if is_attribute else node.target
    if not is_attribute and node.op != "call_method":
        return False
    if name in ("dim", "ndimension", "ndim", "dtype", "device"):
        return True
    if name not in ("shape", "size"):
        return False
    axes = range(len(shape_of(argument(node))))
    dim = argument(node, 1, "dim") if name == "size" else None
    if dim is not None:
        return _leaves_out_channels(dim, axes)
    return all(
        user.target is operator.getitem and _leaves_out_channels(user.args[1], axes)
        for user in node.users
    )


def _leaves_out_channels(item: Any, axes: range) -> bool:
    """Return whether an item of a shape, a number or a slice, is not the number of channels."""
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        is_plain = all(bound is None or isinstance(bound, int) for bound in bounds)
        return is_plain and 1 not in axes[item]
    return isinstance(item, int) and item % max(1, len(axes)) != 1


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


def _is_spatial_mean(node: fx.Node) -> bool:
    """Return whether the axes of a mean are spatial ones."""
    before = shape_of(argument(node))
    if len(before) < 3:
        return False
    dim = argument(node, 1, "dim")
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return all(isinstance(d, int) and d % len(before) >= 2 for d in dims)
