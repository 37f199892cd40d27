"""A traced graph freed of what changes nothing at inference, and of writes in place."""

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from selectconv.errors import CompressionError
from selectconv.graph.kinds import shape_of
from selectconv.graph.operations import IN_PLACE_OPERATORS, Family, argument, family_of
from selectconv.graph.tracer import module_of

_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_CONVS: dict[Any, Any] = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
_CONV_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
# These may give a second name to the memory of their input.
_SECOND_NAMES = {Family.VIEW, Family.CAST, Family.CONTIGUOUS}
_DROPOUTS = {Family.DROPOUT, Family.ALPHA_DROPOUT}


def purify(module: fx.GraphModule, source: nn.Module) -> None:
    """Rewrite a traced model as functions of values, without writes.

    Args:
        module: is changed; torch.fx's ShapeProp has run on it.
        source: the model that was traced.
    """
    made: dict[Any, str] = {}
    for node in list(module.graph.nodes):
        if _is_inert(module, node):
            node.replace_all_uses_with(argument(node))
            module.graph.erase_node(node)
        elif node.op == "call_function" and node.target is torch._assert:
            module.graph.erase_node(node)
        elif node.op == "call_function" and node.target is F.batch_norm:
            _make_norm_module(module, node, source, made)
        elif node.op == "call_function" and node.target in _CONVS:
            _make_conv_module(module, node, made)
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


def _make_norm_module(
    root: fx.GraphModule, node: fx.Node, source: nn.Module, made: dict[Any, str]
) -> None:
    """Let a module do what a functional batch norm does; its state is that of the norm."""
    tensors = [
        argument(node, place, name)
        for place, name in enumerate(("running_mean", "running_var", "weight", "bias"), 1)
    ]
    kind = _NORMS.get(len(shape_of(node)))
    if kind is None or argument(node, 5, "training", False) is not False:
        return
    if not all(isinstance(arg, fx.Node) and arg.op == "get_attr" for arg in tensors):
        return
    mean, var, weight, bias = (operator.attrgetter(str(arg.target))(root) for arg in tensors)
    eps, momentum = argument(node, 7, "eps", 1e-5), argument(node, 6, "momentum", 0.1)
    norm = kind(len(mean), eps, momentum)
    norm.weight, norm.bias, norm.running_mean, norm.running_var = weight, bias, mean, var
    owner = source.get_submodule(str(tensors[0].target).rpartition(".")[0])
    seen = getattr(owner, "num_batches_tracked", None)
    norm.num_batches_tracked = torch.zeros_like(mean[0], dtype=torch.long) if seen is None else seen
    key = (kind, eps, momentum, *(arg.target for arg in tensors))
    _call_module(root, node, norm, made.setdefault(key, f"_norm_{node.name}"))


def _make_conv_module(root: fx.GraphModule, node: fx.Node, made: dict[Any, str]) -> None:
    """Let a module do what a functional conv does, so that its filters can be removed."""
    settings = {
        name: argument(node, place, name, default)
        for place, (name, default) in enumerate(_CONV_SETTINGS.items(), 3)
    }
    tensors = [argument(node, 1, "weight"), argument(node, 2, "bias")]
    read = [arg for arg in tensors if isinstance(arg, fx.Node)]
    if node.all_input_nodes != [argument(node), *read]:  # a setting is asked for as it runs
        return
    if not all(arg.op == "get_attr" for arg in read):
        return
    weight, *bias = (operator.attrgetter(str(arg.target))(root) for arg in read)
    if not all(isinstance(value, nn.Parameter) for value in (weight, *bias)):
        return
    out_channels, inputs, *kernel_size = weight.shape
    in_channels = inputs * settings["groups"]
    with torch.device("meta"):
        conv = _CONVS[node.target](
            in_channels, out_channels, tuple(kernel_size), bias=bool(bias), **settings
        )
    conv.weight = weight
    if bias:
        conv.bias = bias[0]
    key = (node.target, str(settings), *(arg.target for arg in read))
    _call_module(root, node, conv, made.setdefault(key, f"_conv_{node.name}"))


def _call_module(root: fx.GraphModule, node: fx.Node, module: nn.Module, name: str) -> None:
    """Let a node call a module; one that is called twice has one name."""
    root.add_module(name, module.eval())
    node.op, node.target = "call_module", name
    node.args, node.kwargs = (argument(node),), {}


def _drop_writes(root: fx.GraphModule) -> None:
    """Replace each write in place by a new value, which all later readers read."""
    order = {node: place for place, node in enumerate(root.graph.nodes)}
    modules = [module for module in root.modules() if getattr(module, "inplace", False)]
    for node in list(root.graph.nodes):
        if not (module_of(root, node) in modules or _make_functional(node)):
            continue
        written = argument(node)
        if not isinstance(written, fx.Node) or "tensor_meta" not in written.meta:
            continue  # a number, which nobody can write into
        others = [
            other
            for other in _names_of(root, written)
            if other is not written and order[other] < order[node]
        ]
        if any(order[user] > order[node] for other in others for user in other.users):
            raise CompressionError(
                f"`{node.name}` writes in place into a part of a tensor that is read again; write "
                "it out of place to compress the model. Uncompressed, with masked slots, it still "
                "works."
            )
        for user in [user for user in written.users if order[user] > order[node]]:
            user.replace_input_with(written, node)
    for module in modules:
        module.inplace = False  # type: ignore[assignment]


def _make_functional(node: fx.Node) -> bool:
    """Turn a call that writes into its input into one that does not; False: it did not write."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.op == "call_function" and "inplace" in (names := _argument_names(node.target)):
        place = names.index("inplace")
        if argument(node, place, "inplace", False) is not True:
            return False
        node.args = node.args[:place]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return True
    if node.op == "call_function" and node.target in IN_PLACE_OPERATORS:
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
    raise CompressionError(
        f"`{node.name}` writes in place in a way that is not known; write it out of place to "
        "compress the model. Uncompressed, with masked slots, it still works."
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
