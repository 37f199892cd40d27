"""A traced graph freed of what changes nothing at inference, and of writes in place."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from selectconv.errors import CompressionError
from selectconv.trace.kinds import argument

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


def drop_inert(graph: fx.Graph, root: nn.Module) -> None:
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
    norm = nn.BatchNorm2d(
        len(mean), argument(node, 7, "eps", 1e-5), argument(node, 6, "momentum", 0.1)
    )
    norm.weight, norm.bias, norm.running_mean, norm.running_var = weight, bias, mean, var
    owner = root.get_submodule(str(tensors[0].target).rpartition(".")[0])
    seen = getattr(owner, "num_batches_tracked", None)
    norm.num_batches_tracked = torch.zeros_like(mean[0], dtype=torch.long) if seen is None else seen
    name = f"_norm_{node.name}"
    root.add_module(name, norm.eval())
    node.op, node.target = "call_module", name
    node.args, node.kwargs = (argument(node, 0, "input"),), {}


def drop_writes(graph: fx.Graph, root: nn.Module) -> None:
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


def _module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None
