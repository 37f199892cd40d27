"""What one step of a traced model does to the mean of each channel.

Modules of timm and torchvision are known by package and name, so that neither is imported. Only
exact types count: a subclass may compute something else.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core.ecdm import Activation

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BATCH_NORM_ACTS = {("timm", "BatchNormAct2d"), ("timm", "SyncBatchNormAct")}
_ACTIVATION_MODULES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
_NAMED_ACTIVATIONS = {
    ("timm", name)
    for name in (
        "GELU", "GELUTanh", "HardMish", "HardMishMe", "HardSigmoid", "HardSigmoidMe", "HardSwish",
        "HardSwishMe", "Mish", "MishMe", "PReLU", "QuickGELU", "Sigmoid", "Swish", "SwishMe",
        "Tanh",
    )
}  # fmt: skip
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
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
)  # fmt: skip
_DROP_PATH, _STOCHASTIC_DEPTH = ("timm", "DropPath"), ("torchvision", "StochasticDepth")
_MEAN_KEEPING_FUNCTIONS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.interpolate,
)  # fmt: skip
_AVERAGE_POOL_MODULES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_AVERAGE_POOL_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_SAME_VALUES_METHODS = (
    "contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type_as",
)  # fmt: skip
_CONCATS = (torch.cat, torch.concat, torch.concatenate)
_ZEROS = (torch.zeros, torch.zeros_like)
IN_PLACE_OPERATORS = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.ipow, operator.imod, operator.iand, operator.ior, operator.ixor,
)  # fmt: skip
# Behind these, and behind modules with weights of their own, raw input is raw no more.
_RAW_ENDS = (
    *_ACTIVATION_FUNCTIONS, F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.linear,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.embedding,
)  # fmt: skip
# What takes a tensor's shape, dtype or device, but none of its values.
_VALUELESS_METHODS = (
    "size", "dim", "ndimension", "numel", "type", "new_zeros", "new_ones", "new_full", "new_empty",
)  # fmt: skip
_VALUELESS_FUNCTIONS = (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
_VALUELESS_ATTRIBUTES = ("shape", "ndim", "dtype", "device")


class Chain:
    """Elementwise activations one after another, as one callable."""

    def __init__(self, acts: tuple[Activation, ...]) -> None:
        self.acts = acts

    def __call__(self, x: Tensor) -> Tensor:
        """Apply them all."""
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


def is_known_whole(module: nn.Module) -> bool:
    """Tell whether a module is to be seen as one step, although it is not torch's own."""
    name = _name(module)
    return (
        isinstance(module, _BatchNorm)
        or name in _NAMED_ACTIVATIONS
        or name in (_DROP_PATH, _STOCHASTIC_DEPTH)
    )


def argument(node: fx.Node, keyword: str = "input") -> Any:
    """Return the first argument of a step."""
    return node.args[0] if node.args else node.kwargs.get(keyword)


def setting(node: fx.Node, place: int, keyword: str, default: Any = None) -> Any:
    """Return a further argument of a step, given by its place or by keyword."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)


def norm_and_activations(
    module: nn.Module | None,
) -> tuple[_BatchNorm, tuple[Activation, ...]] | None:
    """Split a batch norm from the activations that it applies itself; None: no batch norm."""
    if type(module) in _BATCH_NORMS:
        return cast(_BatchNorm, module), ()
    if not isinstance(module, _BatchNorm) or _name(module) not in _BATCH_NORM_ACTS:
        return None
    act: Any = getattr(module, "act", None)
    if type(getattr(module, "drop", None)) is not nn.Identity:
        return None  # what drops activations before a non-linear one changes the mean behind it
    if type(act) is nn.Identity:
        return module, ()
    return (module, (act,)) if _is_activation(act) else None


def activation(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """Return a step's elementwise function with its settings; None if it is not elementwise."""
    if _is_activation(module):
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


def keeps_values(node: fx.Node, module: nn.Module | None) -> bool:
    """Tell whether a step only passes on, or repeats, the values that it gets."""
    if type(module) in (nn.Upsample, nn.UpsamplingNearest2d):
        return str(cast(nn.Upsample, module).mode).startswith("nearest")
    if module is not None:
        return type(module) is nn.Identity
    if node.op == "call_function" and node.target is F.interpolate:
        return str(setting(node, 3, "mode", "nearest")).startswith("nearest")
    return node.op == "call_method" and node.target in _SAME_VALUES_METHODS


def keeps_mean(node: fx.Node, module: nn.Module | None) -> bool:
    """Tell whether the mean of every channel is the same before and behind a step."""
    # Zeros that a pool averages in lower the mean, and so does another divisor.
    unpadded = (0, (0,), (0, 0), (0, 0, 0))
    if type(module) in _AVERAGE_POOL_MODULES:
        pool = cast(nn.AvgPool2d, module)
        is_padded = pool.padding not in unpadded and pool.count_include_pad
        return not is_padded and getattr(pool, "divisor_override", None) is None
    if module is not None and _name(module) == _DROP_PATH:
        return bool(getattr(module, "scale_by_keep", False))
    if module is not None:
        return type(module) in _MEAN_KEEPING_MODULES or _name(module) == _STOCHASTIC_DEPTH
    if node.op == "call_function" and node.target in _AVERAGE_POOL_FUNCTIONS:
        return setting(node, 3, "padding", 0) in unpadded and (
            setting(node, 6, "divisor_override") is None
        )
    return node.op == "call_function" and node.target in _MEAN_KEEPING_FUNCTIONS


def is_concat(node: fx.Node) -> bool:
    """Tell whether a step concatenates tensors."""
    return node.op == "call_function" and node.target in _CONCATS


def is_zeros(node: Any) -> bool:
    """Tell whether a step makes zeros."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == "new_zeros"
    return node.op == "call_function" and node.target in _ZEROS


def writes_into(user: fx.Node, module: nn.Module | None, node: fx.Node) -> bool:
    """Tell whether a step writes into `node`, which it takes."""
    if argument(user) is not node:
        return False
    if user.op == "call_module":
        return bool(getattr(module, "inplace", False))
    if user.op == "call_function" and user.target in (*IN_PLACE_OPERATORS, operator.setitem):
        return True
    name = str(getattr(user.target, "__name__", user.target))
    return user.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


def raw_inputs(node: fx.Node, module: nn.Module | None) -> list[fx.Node]:
    """Return the inputs of a step whose raw values would still be raw behind it."""
    if module is not None:
        learns = next(module.parameters(), None) is not None
        if learns or _is_activation(module) or "Norm" in type(module).__name__:
            return []
        if type(module).__module__.startswith("torch.nn.modules.activation"):
            return []
    if node.op == "call_function" and node.target in (*_RAW_ENDS, *_VALUELESS_FUNCTIONS):
        return []
    if node.op == "call_function" and node.target is getattr:
        return [] if node.args[1] in _VALUELESS_ATTRIBUTES else node.all_input_nodes
    if node.op == "call_method" and node.target in (*_ACTIVATION_METHODS, *_VALUELESS_METHODS):
        return []
    return node.all_input_nodes


def differ_by_channel(acts: tuple[Activation, ...]) -> bool:
    """Tell whether an activation treats channels differently."""
    return any(isinstance(act, nn.PReLU) and act.num_parameters > 1 for act in acts)


def _is_activation(module: Any) -> bool:
    return type(module) in _ACTIVATION_MODULES or (
        isinstance(module, nn.Module) and _name(module) in _NAMED_ACTIVATIONS
    )


def _name(module: nn.Module) -> tuple[str, str]:
    """Return the package that a module's class comes from, and its name."""
    return type(module).__module__.partition(".")[0], type(module).__name__
