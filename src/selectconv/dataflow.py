"""A model as a list of operations on channels, which counting and compressing share.

The forward is traced with torch.fx on a copy of the model, freed of what changes nothing at
inference (dropout, identities) and of writes in place, and run once to see every shape. Each
operation then has one of a few kinds, which say how its output channels depend on its inputs'.
What is of no known kind reads all channels and keeps its own: compressing leaves it alone.
"""

import copy
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from selectconv.concat_buffer import undo_buffers
from selectconv.errors import CompressionError
from selectconv.example import as_arguments, evaluating
from selectconv.layer import SelectConvNd
from selectconv.pointwise import Pointwise2d, split_sums

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, Pointwise2d)
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
_INERT_MODULES = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip
_INERT_FUNCTIONS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip
_INERT_METHODS = ("detach",)
# These may give a second name to the memory of their input.
_VIEW_FUNCTIONS = (
    torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.permute, torch.transpose,
    torch.chunk, torch.split, torch.narrow, torch.movedim, torch.unbind, operator.getitem,
)  # fmt: skip
_VIEW_METHODS = (
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "chunk", "split",
    "narrow", "movedim", "unbind", "expand", "expand_as", "view_as", "to", "type_as", "float", "t",
    "select", "unflatten", "contiguous",
)  # fmt: skip
_IN_PLACE_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


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
    undo_buffers(graph)
    split_sums(graph, root)
    _drop_inert(graph, root)
    _drop_writes(graph, root)
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
        kind = _classify(node, module, recorder.shapes)
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
        return isinstance(m, SelectConvNd | Pointwise2d) or super().is_leaf_module(
            m, module_qualified_name
        )

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


def _module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def argument(node: fx.Node, place: int, keyword: str, default: Any = None) -> Any:
    """Read an argument of a call by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)


def _drop_inert(graph: fx.Graph, root: nn.Module) -> None:
    """Drop what returns its input at inference, and checks; functional batch norms get modules."""
    for node in list(graph.nodes):
        module = _module(root, node)
        is_inert = type(module) in _INERT_MODULES
        if node.op == "call_function" and node.target in _INERT_FUNCTIONS:
            # `training` is a plain bool where the module passed its own flag.
            is_inert = argument(node, 2, "training", True) is False
        if node.op == "call_method" and node.target in _INERT_METHODS:
            is_inert = True
        if is_inert:
            node.replace_all_uses_with(argument(node, 0, "input"))
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is torch._assert:
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is F.batch_norm:
            _make_norm_module(node, root)


def _make_norm_module(node: fx.Node, root: nn.Module) -> None:
    tensors = [
        argument(node, place, name)
        for place, name in enumerate(("running_mean", "running_var", "weight", "bias"), 1)
    ]
    if argument(node, 5, "training", False) is not False:
        return
    if not all(isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in tensors):
        return
    mean, var, weight, bias = (operator.attrgetter(str(arg.target))(root) for arg in tensors)
    norm = nn.BatchNorm2d(len(mean), eps=argument(node, 7, "eps", 1e-5), device="meta")
    norm.weight, norm.bias, norm.running_mean, norm.running_var = weight, bias, mean, var
    name = f"_norm_{node.name}"
    root.add_module(name, norm.eval())
    node.op, node.target = "call_module", name
    node.args, node.kwargs = (argument(node, 0, "input"),), {}


def _drop_writes(graph: fx.Graph, root: nn.Module) -> None:
    """Replace each write in place by a new value, which all later readers read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    modules = [module for module in root.modules() if getattr(module, "inplace", False)]
    for node in list(graph.nodes):
        if not (_module(root, node) in modules or _make_functional(node)):
            continue
        written = argument(node, 0, "input")
        if not isinstance(written, fx.Node):
            continue
        others = [
            other
            for other in _names_of(written)
            if other is not written and order[other] < order[node]
        ]
        if any(order[user] > order[node] for other in others for user in other.users):
            raise CompressionError(
                f"`{node.name}` writes in place into a part of a tensor that is read again; write "
                "it out of place to compress the model. As it is, masked, it still works."
            )
        later = [user for user in written.users if order[user] > order[node]]
        for user in later:
            user.replace_input_with(written, node)
    for module in modules:
        module.inplace = False  # type: ignore[assignment]


def _make_functional(node: fx.Node) -> bool:
    """Turn a call that writes into its input into one that does not; False: it did not write."""
    if node.op == "call_function" and "inplace" in (names := _argument_names(node.target)):
        place = names.index("inplace")
        if argument(node, place, "inplace", False) is not True:
            return False
        node.args = node.args[:place]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return True
    if node.op == "call_function" and node.target in _IN_PLACE_OPERATORS:
        node.target = _IN_PLACE_OPERATORS[node.target]
        return True
    name = str(getattr(node.target, "__name__", node.target))
    if node.op not in ("call_method", "call_function"):
        return False
    if not name.endswith("_") or name.endswith("__"):
        return False
    if node.op == "call_method" and hasattr(Tensor, name[:-1]):
        node.target = name[:-1]
        return True
    for home in (torch, F):
        if getattr(home, name, None) is node.target and hasattr(home, name[:-1]):
            node.target = getattr(home, name[:-1])
            return True
    raise CompressionError(
        f"`{node.name}` writes in place in a way that is not known; write it out of place to "
        "compress the model. As it is, masked, it still works."
    )


def _argument_names(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin, none of which has such an argument
        return []


def _names_of(node: fx.Node) -> list[fx.Node]:
    """List the nodes that may share a node's memory, as its views or as what it is a view of."""
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    names = [node]
    for name in names:  # grows on the way
        names += [user for user in name.users if _is_view(user) and user.args[0] is name]
    return names


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEW_METHODS
    return node.op == "call_function" and node.target in _VIEW_FUNCTIONS


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


def _classify(
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
