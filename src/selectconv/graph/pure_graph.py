"""A traced graph freed of what changes nothing at inference, and of writes in place."""

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from selectconv.errors import CompressionError
from selectconv.graph.operations import IN_PLACE_OPERATORS, Family, argument, family_of
from selectconv.graph.tracer import module_of

_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_CONVS: dict[Any, Any] = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
_CONV_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
# These may give a second name to the memory of their input.
_SECOND_NAMES = {Family.VIEW, Family.CAST, Family.CONTIGUOUS}
_DROPOUTS = {Family.DROPOUT, Family.ALPHA_DROPOUT}


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a traced value on the example; empty where it is not a tensor."""
    value = node.meta.get("value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def purify(module: fx.GraphModule) -> None:
    """Rewrite a model that `ShapeTracer` traced as functions of values, without writes."""
    made: dict[Any, str] = {}
    for node in list(module.graph.nodes):
        if _is_inert(module, node):
            node.replace_all_uses_with(argument(node))
            module.graph.erase_node(node)
        elif node.op == "call_function" and node.target is torch._assert:
            module.graph.erase_node(node)
        elif node.op == "call_function" and node.target is F.batch_norm:
            _call_norm(module, node, made)
        elif node.op == "call_function" and node.target in _CONVS:
            _call_conv(module, node, made)
    _drop_writes(module)
    for node in module.graph.nodes:
        if family_of(node, None) is Family.COPY:  # nobody writes any more
            node.replace_all_uses_with(argument(node))
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_inert(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node returns its input at inference."""
    family = family_of(node, module_of(root, node))
    if family in _DROPOUTS and node.op == "call_function":
        # `training` is a plain bool where the module passed its own flag.
        return argument(node, 2, "training", True) is False
    return family is Family.IDENTITY or family in _DROPOUTS


def _call_norm(root: fx.GraphModule, node: fx.Node, made: dict[Any, str]) -> None:
    """Let a module do what a functional batch norm does, so that its entries can be removed."""
    kind, names = _NORMS.get(len(shape_of(node))), ("running_mean", "running_var", "weight", "bias")
    state = _held(root, {name: argument(node, 1 + i, name) for i, name in enumerate(names)})
    if kind is None or state is None or argument(node, 5, "training", False) is not False:
        return
    settings = {
        "momentum": argument(node, 6, "momentum", 0.1),
        "eps": argument(node, 7, "eps", 1e-5),
    }
    norm = kind(len(state["running_mean"]), **settings)
    _call_module(root, node, norm, state, made, f"{kind.__name__} {settings}")


def _call_conv(root: fx.GraphModule, node: fx.Node, made: dict[Any, str]) -> None:
    """Let a module do what a functional conv does, so that its filters can be removed."""
    settings = {
        name: argument(node, 3 + i, name, default)
        for i, (name, default) in enumerate(_CONV_SETTINGS.items())
    }
    tensors = {"weight": argument(node, 1, "weight"), "bias": argument(node, 2, "bias")}
    state = _held(root, {name: arg for name, arg in tensors.items() if arg is not None})
    if state is None or not all(isinstance(value, nn.Parameter) for value in state.values()):
        return
    if len(node.all_input_nodes) > 1 + len(state):  # a setting is asked for as the model runs
        return
    out_channels, inputs, *kernel_size = state["weight"].shape
    with torch.device("meta"):
        conv = _CONVS[node.target](
            inputs * settings["groups"], out_channels, kernel_size, bias="bias" in state, **settings
        )
    _call_module(root, node, conv, state, made, str(settings))


def _held(root: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor] | None:
    """Look up arguments that are parameters or buffers of the model; None: not all are."""
    if not all(isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in arguments.values()):
        return None
    return {name: operator.attrgetter(str(arg.target))(root) for name, arg in arguments.items()}


def _call_module(
    root: fx.GraphModule,
    node: fx.Node,
    module: nn.Module,
    state: dict[str, Tensor],
    made: dict[Any, str],
    settings: str,
) -> None:
    """Let a node call a module with this state; one that is called twice has one name."""
    for name, value in state.items():
        setattr(module, name, value)
    key = (node.target, settings, *(id(value) for value in state.values()))
    node.op, node.target = "call_module", made.setdefault(key, f"_{node.name}")
    node.args, node.kwargs = (argument(node),), {}
    root.add_module(node.target, module.eval())


def _drop_writes(root: fx.GraphModule) -> None:
    """Replace each write in place by a new value, which all later readers read."""
    order = {node: place for place, node in enumerate(root.graph.nodes)}
    modules = [module for module in root.modules() if getattr(module, "inplace", False)]
    for node in list(root.graph.nodes):
        if not (module_of(root, node) in modules or _make_functional(node)):
            continue
        written = argument(node)
        if not isinstance(written, fx.Node) or not isinstance(written.meta["value"], Tensor):
            continue  # a number, which nobody can write into
        later = {other for other in root.graph.nodes if order[other] > order[node]}
        names = [name for name in _names_of(root, written) if name is not written]
        if any(name not in later and later & set(name.users) for name in names):
            raise _not_followed(node, "into a part of a tensor that is read again")
        for user in later & set(written.users):
            user.replace_input_with(written, node)
    for module in modules:
        module.inplace = False  # type: ignore[assignment]


def _make_functional(node: fx.Node) -> bool:
    """Turn a call that writes into its input into one that does not; False: it did not write."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.op == "call_function" and "inplace" in (names := _argument_names(node.target)):
        place = names.index("inplace")
        is_written = argument(node, place, "inplace", False) is True
        node.args = node.args[:place]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return is_written
    if node.target in IN_PLACE_OPERATORS:
        node.target = IN_PLACE_OPERATORS[node.target]
        return True
    name = str(getattr(node.target, "__name__", node.target))
    if node.target is not operator.setitem and (not name.endswith("_") or name.endswith("__")):
        return False
    if node.op == "call_method" and hasattr(Tensor, name[:-1]):
        node.target = name[:-1]
        return True
    for home in (torch, F):
        if getattr(home, name, None) is node.target and hasattr(home, name[:-1]):
            node.target = getattr(home, name[:-1])
            return True
    raise _not_followed(node, "in a way that is not known")


def _not_followed(node: fx.Node, how: str) -> CompressionError:
    return CompressionError(
        f"`{node.name}` writes in place {how}; write it out of place to compress the model. "
        "Uncompressed, with masked slots, it still works."
    )


def _argument_names(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin, none of which has such an argument
        return []


def _names_of(root: nn.Module, node: fx.Node) -> list[fx.Node]:
    """List the nodes that may share a node's memory, as its views or as what it is a view of."""

    def is_view(node: fx.Node) -> bool:
        return family_of(node, module_of(root, node)) in _SECOND_NAMES

    path = [node]
    while is_view(path[-1]) and isinstance(argument(path[-1]), fx.Node):
        path.append(argument(path[-1]))
    names = [path[-1]]
    for name in names:  # grows on the way
        views = [user for user in name.users if is_view(user) and argument(user) is name]
        names += [view for view in views if not any(_are_apart(view, own) for own in path)]
    return names


def _are_apart(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes take different items of one tensor, or of its parts."""
    if not (one.target is other.target is operator.getitem and one.args[0] is other.args[0]):
        return False
    items = (one.args[1], other.args[1])
    return items[0] != items[1] and all(isinstance(item, int) and item >= 0 for item in items)
