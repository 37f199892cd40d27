"""What one step of a traced model does to the mean of each channel."""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selectconv.core.moments import Activation
from selectconv.graph.operations import (
    ATTRIBUTES,
    IN_PLACE_OPERATORS,
    Family,
    argument,
    family_of,
    find_module_row,
    find_row,
    is_activation,
    out_of_place,
)

_SAME_VALUES = {Family.IDENTITY, Family.CAST, Family.CONTIGUOUS, Family.COPY}
_SAME_MEAN = {Family.DROPOUT, Family.ADAPTIVE_AVERAGE_POOL, Family.RESIZE}
# After these, and after modules with weights of their own, raw input is no longer raw.
_RAW_ENDS = {
    Family.ACTIVATION, Family.LAYER, Family.NORM, Family.SIZE, Family.ZEROS, Family.FILL
}  # fmt: skip
_UNPADDED = (0, (0,), (0, 0), (0, 0, 0))


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


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is to be seen as one step, although it may not be torch's own."""
    is_layer = isinstance(module, nn.modules.conv._ConvNd | _BatchNorm)
    return is_layer or find_module_row(module) is not None


def norm_and_activations(
    module: nn.Module | None,
) -> tuple[_BatchNorm, tuple[Activation, ...]] | None:
    """Split a batch norm from the activations that it applies itself; None: no batch norm."""
    row = None if module is None else find_module_row(module)
    if row is None or row.family is not Family.NORM or not isinstance(module, _BatchNorm):
        return None
    if type(module) in row.modules:
        return module, ()
    if type(getattr(module, "drop", None)) is not nn.Identity:
        return None  # what drops activations before a non-linear one changes the mean after it
    act: Any = getattr(module, "act", None)
    if type(act) is nn.Identity:
        return module, ()
    return (module, (act,)) if is_activation(act) else None


def activation(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """Return a step's elementwise function with its settings; None if it is not elementwise."""
    row = find_row(node, module)
    if row is None or row.family is not Family.ACTIVATION:
        return None
    if module is not None:
        return module
    if any(isinstance(value, fx.Node) for value in (*node.args[1:], *node.kwargs.values())):
        return None  # computed on the way: not a fixed function of one input
    is_method = node.op == "call_method"
    function = row.function if is_method else out_of_place(cast(Callable[..., Any], node.target))
    kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    if not (node.args[1:] or kwargs):
        return function
    return _Configured(function, tuple(node.args[1:]), kwargs)


def keeps_values(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step only passes on, or repeats, the values that it gets."""
    family = family_of(node, module)
    if family is Family.RESIZE:
        mode = argument(node, 3, "mode", "nearest") if module is None else module.mode
        return str(mode).startswith("nearest")
    return family in _SAME_VALUES


def keeps_mean(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a step keeps the mean of every channel."""
    family = family_of(node, module)
    if family is Family.AVERAGE_POOL:
        return _is_plain_average(node, module)
    does_scale = getattr(module, "scale_by_keep", True)  # timm's DropPath may not
    return family in _SAME_MEAN and bool(does_scale)


def _is_plain_average(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a pool averages nothing but its input: no zeros, and by no other divisor."""
    if module is None:
        is_padded = argument(node, 3, "padding", 0) not in _UNPADDED
        return not is_padded and argument(node, 6, "divisor_override") is None
    pool = cast(nn.AvgPool2d, module)
    is_padded = pool.padding not in _UNPADDED and pool.count_include_pad
    return not is_padded and getattr(pool, "divisor_override", None) is None


def writes_into(user: fx.Node, module: nn.Module | None, node: fx.Node) -> bool:
    """Return whether a step writes into `node`, which it takes."""
    if argument(user) is not node:
        return False
    if user.op == "call_module":
        return bool(getattr(module, "inplace", False))
    if user.op == "call_function" and user.target in (*IN_PLACE_OPERATORS, operator.setitem):
        return True
    name = str(getattr(user.target, "__name__", user.target))
    return user.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


def raw_inputs(node: fx.Node, module: nn.Module | None) -> list[fx.Node]:
    """Return the inputs of a step whose raw values would still be raw after it."""
    if module is not None:
        learns = next(module.parameters(), None) is not None
        if learns or "Norm" in type(module).__name__:
            return []
        if type(module).__module__.startswith("torch.nn.modules.activation"):
            return []
    if family_of(node, module) in _RAW_ENDS:
        return []
    if node.op == "call_function" and node.target is getattr and node.args[1] in ATTRIBUTES:
        return []
    return node.all_input_nodes


def differ_by_channel(acts: tuple[Activation, ...]) -> bool:
    """Return whether an activation treats channels differently."""
    return any(isinstance(act, nn.PReLU) and act.num_parameters > 1 for act in acts)
