"""What a model's graph shows about a conv's input: its mean source, and whether it is raw input.

The graph is torch.fx's. Walking back from a conv, elementwise activations collect until a batch
norm gives the closed form; what keeps a channel's mean is passed through. Anything else ends the
walk: the caller observes the mean instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from selectconv.ecdm import Activation
from selectconv.mean_source import BatchNormMean, ConcatMean, ConstantMean

ClosedForm = BatchNormMean | ConstantMean | ConcatMean

# Only these exact types: a subclass may compute something else (timm's BatchNormAct2d does).
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ACTIVATION_MODULES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
_ACTIVATION_FUNCTIONS = (
    F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid,
    F.mish, F.relu, F.relu6, F.selu, F.silu, F.sigmoid, F.softplus, F.softsign, F.tanh,
    F.tanhshrink, torch.relu, torch.relu_, torch.selu, torch.sigmoid, torch.tanh,
)  # fmt: skip
_ACTIVATION_METHODS = {
    "relu": torch.relu, "relu_": torch.relu, "sigmoid": torch.sigmoid, "sigmoid_": torch.sigmoid,
    "tanh": torch.tanh, "tanh_": torch.tanh,
}  # fmt: skip
# These keep the mean of every channel.
_MEAN_KEEPING_MODULES = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_MEAN_KEEPING_FUNCTIONS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
)  # fmt: skip
_AVERAGE_POOL_MODULES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_AVERAGE_POOL_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_CONCATS = (torch.cat, torch.concat, torch.concatenate)
_ZEROS = (torch.zeros, torch.zeros_like)
# Behind these, raw input is raw no more.
_RAW_ENDS = (
    *_ACTIVATION_FUNCTIONS, F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.linear,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
# What takes a tensor's shape, dtype or device, but none of its values.
_VALUELESS_METHODS = (
    "size", "dim", "ndimension", "numel", "type", "new_zeros", "new_ones", "new_full", "new_empty",
)  # fmt: skip
_VALUELESS_FUNCTIONS = (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
_VALUELESS_ATTRIBUTES = ("shape", "ndim", "dtype", "device")


class _Chain:
    """Elementwise activations one after another, as one callable."""

    def __init__(self, acts: tuple[Activation, ...]) -> None:
        self.acts = acts

    def __call__(self, x: Tensor) -> Tensor:
        for act in self.acts:
            weights = act.parameters() if isinstance(act, nn.Module) else iter(())
            weight = next(weights, None)  # PReLU computes in its weight's dtype only
            x = act(x if weight is None else x.to(weight))
        return x

    def __repr__(self) -> str:
        return " + ".join(
            type(act).__name__
            if isinstance(act, nn.Module)
            else getattr(act, "__name__", repr(act))
            for act in self.acts
        )


class _Configured:
    """An activation function with the arguments that follow its input."""

    def __init__(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        settings = [*map(repr, self.args), *(f"{key}={val!r}" for key, val in self.kwargs.items())]
        return f"{self.function.__name__}({', '.join(settings)})"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (_ConvNd, _BatchNorm)):
            return True
        return super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class ConvInput:
    """What the graph shows of one conv's input.

    Attributes:
        source: the closed form of its mean; None: not shown.
        is_raw: it is reached from the model's input without a norm, activation or conv between.
    """

    source: ClosedForm | None = None
    is_raw: bool = False


@dataclass(frozen=True)
class Graph:
    """A model's convs, by module identity, with what the graph shows of their inputs.

    Attributes:
        inputs: by `id(conv)`; convs that the traced forward does not reach are missing.
        failure: why the model could not be traced; None: it was.
    """

    inputs: dict[int, ConvInput] = field(default_factory=dict)
    failure: str | None = None


def trace(model: nn.Module) -> Graph:
    """Trace a model and look at every conv's input; a model that cannot be traced shows nothing."""
    try:
        with _left_alone(model):
            graph = _Tracer().trace(model)
    except Exception as error:  # user code under a tracer can fail in any way; the reason is kept
        return Graph(failure=f"{type(error).__name__}: {error}".splitlines()[0])
    modules = dict(model.named_modules())
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), _ConvNd):
            calls.setdefault(id(modules[str(node.target)]), []).append(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    inputs = {}
    for key, nodes in calls.items():
        conv = cast(_ConvNd, modules[str(nodes[0].target)])
        walk = _Walk(modules, order, order[nodes[0]], axes=len(conv.kernel_size))
        is_raw = any(walk.is_raw(_argument(node)) for node in nodes)
        source = None
        if len(nodes) == 1 and not is_raw:  # a conv that is called twice has no single input
            source = walk.closed_form(_argument(nodes[0]), (), conv.in_channels)
            if source is not None and source.num_channels != conv.in_channels:
                source = None
        inputs[key] = ConvInput(source, is_raw)
    return Graph(inputs)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Undo what a model's own code does to its modules while it is traced.

    A forward may keep features, count its calls or update statistics in place; the tracer itself
    hangs the constants that it meets on the model.
    """
    dicts = [
        (own, dict(own))
        for module in model.modules()
        for own in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for own, held in dicts:
            own.clear()
            own.update(held)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


class _Walk:
    """Walks a traced graph backwards, from a conv with so many spatial axes.

    Args:
        modules: the model's modules by name.
        order: where each node stands in the program.
        end: where the conv stands.
        axes: the conv's spatial axes.
    """

    def __init__(
        self, modules: dict[str, nn.Module], order: dict[fx.Node, int], end: int, axes: int
    ) -> None:
        self.modules = modules
        self.order = order
        self.end = end
        self.axes = axes

    def closed_form(
        self, node: Any, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        """Find E of `acts(node)` in closed form.

        Args:
            node: where the walk stands.
            acts: the activations passed on the way, in the order in which they are applied.
            width: the number of channels of `node`, where it is known.
        """
        if not isinstance(node, fx.Node) or self._is_overwritten(node):
            return None
        module = self._module(node)
        before = _argument(node)
        if type(module) in _BATCH_NORMS:
            return BatchNormMean(cast(_BatchNorm, module), _compose(acts))
        act = self._activation(node, module)
        if act is not None:
            return self.closed_form(before, (act, *acts), width)
        if _is_concat(node):
            return self._concat(node, acts, width)
        if node.op == "call_function" and node.target is F.pad:
            return self._zero_padded(node, acts, width)
        # A mean that is kept says nothing about the mean of a non-linear function behind it.
        if not acts and self._keeps_mean(node, module):
            return self.closed_form(before, (), width)
        return None

    def is_raw(self, node: Any, seen: set[fx.Node] | None = None) -> bool:
        """Tell whether the model's input reaches `node` past norms, activations and convs."""
        seen = set() if seen is None else seen
        if not isinstance(node, fx.Node) or node in seen:
            return False
        seen.add(node)
        if node.op == "placeholder":
            return True
        module = self._module(node)
        if module is not None:
            changes = (_ConvNd, _BatchNorm, nn.Linear, nn.LayerNorm, nn.GroupNorm)
            is_act = type(module).__module__.startswith("torch.nn.modules.activation")
            if isinstance(module, changes) or is_act or "Norm" in type(module).__name__:
                return False
        if node.op == "call_function" and node.target in (*_RAW_ENDS, *_VALUELESS_FUNCTIONS):
            return False
        if node.op == "call_function" and node.target is getattr:
            return node.args[1] not in _VALUELESS_ATTRIBUTES and self.is_raw(node.args[0], seen)
        if node.op == "call_method" and node.target in (*_ACTIVATION_METHODS, *_VALUELESS_METHODS):
            return False
        return any(self.is_raw(before, seen) for before in node.all_input_nodes)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Tell whether something off the conv's path may have written into `node` before it."""
        return len(node.users) > 1 and any(
            self._writes_into(user, node) and self.order[user] < self.end for user in node.users
        )

    def _writes_into(self, user: fx.Node, node: fx.Node) -> bool:
        if _argument(user) is not node:
            return False
        if user.op == "call_module":
            return bool(getattr(self._module(user), "inplace", False))
        name = str(getattr(user.target, "__name__", user.target))
        return user.kwargs.get("inplace") is True or (
            name.endswith("_") and not name.endswith("__")
        )

    @staticmethod
    def _activation(node: fx.Node, module: nn.Module | None) -> Activation | None:
        if type(module) in _ACTIVATION_MODULES:
            return module
        if any(isinstance(value, fx.Node) for value in (*node.args[1:], *node.kwargs.values())):
            return None  # computed on the way: not a fixed function of one input
        if node.op == "call_method" and node.target in _ACTIVATION_METHODS:
            return _ACTIVATION_METHODS[str(node.target)]
        if node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS:
            function = cast(Callable[..., Tensor], node.target)
            kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
            if not (node.args[1:] or kwargs):
                return function
            return _Configured(function, tuple(node.args[1:]), kwargs)
        return None

    @staticmethod
    def _keeps_mean(node: fx.Node, module: nn.Module | None) -> bool:
        # Zeros that a pool averages in lower the mean, and so does another divisor.
        unpadded = (0, (0,), (0, 0), (0, 0, 0))
        if isinstance(module, _AVERAGE_POOL_MODULES):
            is_padded = module.padding not in unpadded and module.count_include_pad
            return not is_padded and getattr(module, "divisor_override", None) is None
        if module is not None:
            return type(module) in _MEAN_KEEPING_MODULES
        if node.op == "call_method":
            return node.target == "contiguous"
        if node.target in _AVERAGE_POOL_FUNCTIONS:
            padding = node.args[3] if len(node.args) > 3 else node.kwargs.get("padding", 0)
            divisor = node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
            return padding in unpadded and divisor is None
        return node.target in _MEAN_KEEPING_FUNCTIONS

    def _concat(
        self, node: fx.Node, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        tensors = _argument(node, "tensors")
        dim = (
            node.args[1]
            if len(node.args) > 1
            else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        )
        if dim != 1 or not isinstance(tensors, list | tuple) or _differs_by_channel(acts):
            return None
        parts = [self.closed_form(tensor, acts, None) for tensor in tensors]
        # Appended zeros do not say how many they are: what is missing must be theirs.
        unknown = [i for i, part in enumerate(parts) if part is None]
        if len(unknown) == 1 and width is not None and _is_zeros(tensors[unknown[0]]):
            rest = width - sum(part.num_channels for part in parts if part is not None)
            if rest > 0:
                parts[unknown[0]] = _constant(acts, rest)
        if any(part is None for part in parts):
            return None
        return ConcatMean([part for part in parts if part is not None])

    def _zero_padded(
        self, node: fx.Node, acts: tuple[Activation, ...], width: int | None
    ) -> ClosedForm | None:
        pad = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
        mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
        value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value", None)
        if not isinstance(pad, list | tuple) or len(pad) < 2 or _differs_by_channel(acts):
            return None
        # F.pad counts from the last axis: the pair behind the spatial ones is the channels'.
        *spatial, front, back = pad
        if len(spatial) != 2 * self.axes or any(size != 0 for size in spatial):
            return None
        if not (isinstance(front, int) and isinstance(back, int)) or min(front, back) < 0:
            return None
        if mode != "constant" or value not in (None, 0, 0.0):
            return None
        inner = None if width is None else width - front - back
        part = self.closed_form(_argument(node), acts, inner)
        if part is None or (inner is not None and part.num_channels != inner):
            return None
        parts: list[ClosedForm] = [part]
        if front:
            parts.insert(0, _constant(acts, front))
        if back:
            parts.append(_constant(acts, back))
        return ConcatMean(parts)


def _argument(node: fx.Node, keyword: str = "input") -> Any:
    return node.args[0] if node.args else node.kwargs.get(keyword)


def _compose(acts: tuple[Activation, ...]) -> Activation | None:
    if not acts:
        return None
    return acts[0] if len(acts) == 1 else _Chain(acts)


def _differs_by_channel(acts: tuple[Activation, ...]) -> bool:
    return any(isinstance(act, nn.PReLU) and act.num_parameters > 1 for act in acts)


def _constant(acts: tuple[Activation, ...], num_channels: int) -> ConstantMean:
    return ConstantMean(_Chain(acts)(torch.zeros(1)).item(), num_channels)


def _is_concat(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _CONCATS


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == "new_zeros"
    return node.op == "call_function" and node.target in _ZEROS
