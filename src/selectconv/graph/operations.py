"""The table of operations: every one that selectconv knows has one row, and one family.

Conversion reads here what happens to E[X], counting and compression how channels depend on each
other, saving what a file may name, and pruning which activation a gradient belongs to. A new
activation is one row. Only exact types count: a subclass may compute something else. Modules of
timm and torchvision are known by package and name, so that neither is imported.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


class Family(Enum):
    """What an operation does."""

    ACTIVATION = auto()  # the same function of every element, with fixed settings
    ARITHMETIC = auto()  # element by element, of one tensor or more
    AVERAGE_POOL = auto()
    SPATIAL = auto()  # each map by itself, in a way that changes its mean
    RESIZE = auto()  # maps become larger or smaller
    PAD = auto()  # any axes get a frame
    MEAN = auto()  # over any axes
    EXTREME = auto()  # the largest or smallest over any axes
    NORM = auto()  # batch norm
    LAYER = auto()  # anything else with weights, or that normalises
    CONCAT = auto()
    DROPOUT = auto()  # keeps the mean of every channel
    ALPHA_DROPOUT = auto()
    IDENTITY = auto()  # returns its input
    CAST = auto()  # the same values in another dtype or on another device
    CONTIGUOUS = auto()  # the same values in another layout of memory
    COPY = auto()  # the same values in memory of its own
    REARRANGE = auto()  # the same values, or some of them, in another order or shape
    SIZE = auto()  # takes a shape or a type, but no values
    OTHER = auto()  # known to files only


@dataclass(frozen=True)
class Row:
    """One operation, under all names that it has.

    Attributes:
        family: what it does; None: the table does not have it.
        names: of functions in torch and torch.nn.functional and of methods of tensors, all of the
            same meaning; those of Python's modules begin with "operator." or "math.".
        modules: classes of torch that compute it.
        others: classes of other packages, as "package.name".
        gradient: how autograd's name for it begins; empty where pruning need not know it.
    """

    family: Family | None
    names: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    others: tuple[str, ...] = ()
    gradient: str = ""

    @property
    def function(self) -> Callable[..., Any]:
        """The function of that name."""
        return next(iter(functions_of(self).values()))


def _row(
    family: Family, names: str, *modules: type[nn.Module], others: str = "", gradient: str = ""
) -> Row:
    return Row(family, tuple(names.split()), modules, tuple(others.split()), gradient)


_activation = partial(_row, Family.ACTIVATION)
_ACTIVATIONS = (
    _activation("relu", nn.ReLU, gradient="ReluBackward"),
    _activation("relu6", nn.ReLU6, gradient="HardtanhBackward"),
    _activation("hardtanh", nn.Hardtanh),
    _activation("leaky_relu", nn.LeakyReLU, gradient="LeakyReluBackward"),
    _activation("", nn.PReLU, others="timm.PReLU"),
    _activation("elu", nn.ELU, gradient="EluBackward"),
    _activation("celu", nn.CELU),
    _activation("selu", nn.SELU),
    _activation("gelu", nn.GELU, others="timm.GELU timm.GELUTanh", gradient="GeluBackward"),
    _activation("", others="timm.QuickGELU"),
    _activation("silu", nn.SiLU, others="timm.Swish timm.SwishMe", gradient="SiluBackward"),
    _activation("mish", nn.Mish, others="timm.Mish timm.MishMe", gradient="MishBackward"),
    _activation("", others="timm.HardMish timm.HardMishMe"),
    _activation("sigmoid", nn.Sigmoid, others="timm.Sigmoid", gradient="SigmoidBackward"),
    _activation("hardsigmoid", nn.Hardsigmoid, others="timm.HardSigmoid timm.HardSigmoidMe"),
    _activation(
        "hardswish", nn.Hardswish, others="timm.HardSwish timm.HardSwishMe",
        gradient="HardswishBackward",
    ),
    _activation("logsigmoid", nn.LogSigmoid),
    _activation("tanh", nn.Tanh, others="timm.Tanh", gradient="TanhBackward"),
    _activation("tanhshrink", nn.Tanhshrink),
    _activation("softplus", nn.Softplus, gradient="SoftplusBackward"),
    _activation("softshrink", nn.Softshrink),
    _activation("softsign", nn.Softsign),
)  # fmt: skip
TABLE = (
    *_ACTIVATIONS,
    _row(
        Family.ARITHMETIC,
        "add sub mul div neg abs exp sqrt clamp maximum minimum subtract multiply divide "
        "true_divide negative absolute clip lerp hardshrink threshold operator.add operator.sub "
        "operator.mul operator.truediv operator.neg",
        nn.Hardshrink, nn.Threshold,
    ),
    _row(
        Family.AVERAGE_POOL, "avg_pool1d avg_pool2d avg_pool3d",
        nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, gradient="AvgPool",
    ),
    _row(
        Family.AVERAGE_POOL,
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        gradient="AdaptiveAvgPool",
    ),
    _row(
        Family.SPATIAL,
        "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d",
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
        nn.AdaptiveMaxPool3d, gradient="MaxPool",
    ),
    _row(
        Family.RESIZE, "interpolate",
        nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
    ),
    _row(
        Family.SPATIAL, "lp_pool1d lp_pool2d lp_pool3d",
        nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
        nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.CircularPad1d, nn.CircularPad2d,
        nn.CircularPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
        nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
    ),
    _row(Family.PAD, "pad"),
    _row(Family.MEAN, "mean", gradient="MeanBackward"),
    _row(Family.EXTREME, "amax"),
    _row(Family.EXTREME, "amin"),
    _row(
        Family.NORM, "", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
        others="timm.BatchNormAct2d timm.SyncBatchNormAct",
    ),
    _row(
        Family.LAYER,
        "batch_norm layer_norm group_norm instance_norm linear conv1d conv2d conv3d "
        "conv_transpose1d conv_transpose2d conv_transpose3d embedding bilinear local_response_norm",
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d,
        nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm, nn.ConvTranspose1d,
        nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear, nn.Embedding,
    ),
    _row(Family.CONCAT, "cat concat concatenate"),
    _row(
        Family.DROPOUT, "dropout dropout1d dropout2d dropout3d",
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
        others="timm.DropPath torchvision.StochasticDepth",
    ),
    _row(
        Family.ALPHA_DROPOUT, "alpha_dropout feature_alpha_dropout",
        nn.AlphaDropout, nn.FeatureAlphaDropout,
    ),
    _row(Family.IDENTITY, "detach", nn.Identity),
    _row(Family.CAST, "to float double half bfloat16 type_as"),
    _row(Family.CONTIGUOUS, "contiguous"),
    _row(Family.COPY, "clone"),
    _row(
        Family.REARRANGE,
        "chunk split tensor_split unbind narrow select transpose swapaxes swapdims permute "
        "movedim moveaxis view view_as reshape flatten ravel unflatten squeeze unsqueeze expand "
        "expand_as t operator.getitem",
        nn.Flatten, nn.Unflatten,
    ),
    _row(
        Family.REARRANGE, "flip roll repeat repeat_interleave channel_shuffle pixel_unshuffle",
        nn.ChannelShuffle, nn.PixelUnshuffle,
    ),
    _row(
        Family.SIZE,
        "size dim ndimension numel type zeros zeros_like new_zeros ones ones_like new_ones full "
        "full_like new_full empty_like new_empty",
    ),
    _row(
        Family.OTHER,
        "acos addcdiv addcmul addmm affine_grid all aminmax any arange argmax argmin "
        "argsort asin atan atan2 baddbmm bmm bool broadcast_tensors broadcast_to cdist ceil "
        "clamp_max clamp_min cos cosh cosine_similarity cross cummax cummin cumprod cumsum diag "
        "diagonal dot dstack einsum eq erf erfc exp2 expm1 eye fliplr flipud floor floor_divide "
        "fmax fmin fmod fold frac gather ge glu grid_sample gt hstack index_add index_select int "
        "isfinite isinf isnan kthvalue le linspace log log10 log1p log2 log_softmax logaddexp "
        "logical_and logical_not logical_or logical_xor logit logsumexp long lt masked_fill "
        "matmul max median meshgrid min mm mv nan_to_num ne norm normalize one_hot outer "
        "pairwise_distance pixel_shuffle pow prelu prod quantile reciprocal remainder rms_norm "
        "rot90 round rsqrt scaled_dot_product_attention scatter scatter_add sgn sign sin sinc "
        "sinh softmax softmin sort square stack std std_mean sum take_along_dim tan tensordot "
        "tile topk tril triu trunc unfold var var_mean vstack where math.ceil math.cos math.exp "
        "math.floor math.hypot math.log math.log10 math.log2 math.pow math.prod math.sin "
        "math.sqrt math.tanh math.trunc operator.and_ operator.eq operator.floordiv operator.ge "
        "operator.gt operator.invert operator.le operator.lt operator.matmul operator.mod "
        "operator.ne operator.or_ operator.pow",
        nn.CosineSimilarity, nn.Fold, nn.GLU, nn.LogSoftmax, nn.PairwiseDistance, nn.PixelShuffle,
        nn.RMSNorm, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.Unfold,
    ),
)  # fmt: skip
# Attributes of a tensor that hold none of its values.
ATTRIBUTES = ("shape", "ndim", "dtype", "device")
# What Python's `x += y` and its like call, and the operator that leaves x as it is.
IN_PLACE_OPERATORS: dict[Any, Callable[..., Any]] = {
    getattr(operator, f"__i{name}__"): getattr(operator, f"__{name}__")
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor"
    )
}  # fmt: skip
_HOMES = {"torch": torch, "functional": F}
_PYTHON = {"operator": operator, "math": math}
_UNKNOWN = Row(None)


def functions_of(row: Row, suffix: str = "") -> dict[str, Callable[..., Any]]:
    """Look up the functions of a row, by their home and name: "torch.relu", "functional.relu"."""
    found = {}
    for name in row.names:
        if "." in name:
            of_python, _, own = name.partition(".")
            found[name] = getattr(_PYTHON[of_python], own)
            continue
        for home, module in _HOMES.items():
            function = getattr(module, name + suffix, None)
            if callable(function):
                found[f"{home}.{name}"] = function
    return found


_ROW_OF_MODULE = {kind: row for row in TABLE for kind in row.modules}
_ROW_OF_OTHER = {other: row for row in TABLE for other in row.others}
_ROW_OF_METHOD = {name: row for row in TABLE for name in row.names if hasattr(Tensor, name)}
_ROW_OF_FUNCTION: dict[Any, Row] = {
    function: row for row in TABLE for function in functions_of(row).values()
}
# Activations that write into their input, and the functions that do not.
_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    function: functions_of(row)[name]
    for row in _ACTIVATIONS
    for name, function in functions_of(row, "_").items()
}


def find_row(node: fx.Node, module: nn.Module | None) -> Row:
    """Find the row of a step; its family is None where the table does not have it.

    Args:
        node: a step of a traced model.
        module: the module that it calls, if it calls one.
    """
    if module is not None:
        return find_module_row(module)
    if node.op == "call_function":
        return _ROW_OF_FUNCTION.get(_OUT_OF_PLACE.get(node.target, node.target), _UNKNOWN)
    name = str(node.target) if node.op == "call_method" else ""
    row = _ROW_OF_METHOD.get(name.removesuffix("_"), _UNKNOWN)
    return row if row in _ACTIVATIONS or not name.endswith("_") else _UNKNOWN


def find_module_row(module: nn.Module) -> Row:
    """Find the row of a module; its family is None where the table does not have it."""
    package = type(module).__module__.partition(".")[0]
    other = _ROW_OF_OTHER.get(f"{package}.{type(module).__name__}", _UNKNOWN)
    return _ROW_OF_MODULE.get(type(module), other)


def family_of(node: fx.Node, module: nn.Module | None) -> Family | None:
    """Return what a step does; None: the table does not have it."""
    return find_row(node, module).family


def argument(node: fx.Node, place: int = 0, keyword: str = "input", default: Any = None) -> Any:
    """Read an argument of a call by its place or by its name; the first one by default."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)


def setting(
    node: fx.Node, module: nn.Module | None, place: int, name: str, default: Any = None
) -> Any:
    """Read a setting of a step: an argument of a function, or an attribute of a module."""
    if module is not None:
        return getattr(module, name, default)
    return argument(node, place, name, default)


def writes(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step writes into its first argument."""
    if module is not None or node.op not in ("call_function", "call_method"):
        return bool(getattr(module, "inplace", False))
    name = str(getattr(node.target, "__name__", node.target))
    is_named = name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)
    is_operator = node.target in (*IN_PLACE_OPERATORS, operator.setitem)
    return is_named or is_operator or node.kwargs.get("inplace") is True


def concatenated(node: fx.Node, axes: int) -> list[Any] | None:
    """Return what a concatenation joins along the channels of maps with so many axes, or None."""
    tensors = argument(node, 0, "tensors")
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    is_plain = isinstance(tensors, list | tuple) and dim in (1, -1 - axes)
    return list(tensors) if is_plain else None


def channel_padding(node: fx.Node, axes: int) -> tuple[int, int] | None:
    """Return how many zero channels F.pad adds before and after those of its input.

    Args:
        node: a call of F.pad.
        axes: the spatial axes of its input. F.pad counts from the last axis: the pair after theirs
            is that of the channels.

    Returns:
        The numbers, both 0 where only maps get a frame; None: it does something else.
    """
    pad, value = argument(node, 1, "pad"), argument(node, 3, "value")
    if not isinstance(pad, list | tuple) or not all(isinstance(size, int) for size in pad):
        return None
    if len(pad) <= 2 * axes:
        return 0, 0
    is_zero = argument(node, 2, "mode", "constant") == "constant" and value in (None, 0, 0.0)
    is_plain = is_zero and len(pad) == 2 * axes + 2 and min(pad[-2:]) >= 0
    return (pad[-2], pad[-1]) if is_plain else None
