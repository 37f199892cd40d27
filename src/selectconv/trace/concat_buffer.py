"""Growing concatenations, as in DenseNet, without copying what is there already.

`cat([x, new])` copies all of x for every few new channels. Where readers gather some channels only,
all of a chain of concatenations can share one buffer, in which each step fills in its own channels:
an earlier reader's channels are not written again, so nothing that was read changes.
"""

from typing import Any, cast

import torch
from torch import fx


def fill_buffers(graph: fx.Graph, widths: dict[fx.Node, int]) -> None:
    """Rewrite chains of two or more concatenations as writes into a buffer.

    Args:
        graph: changed in place.
        widths: the number of channels of each map (N, C, H, W) that is concatenated.
    """
    chains: list[list[fx.Node]] = []
    for node in graph.find_nodes(op="call_function", target=torch.cat):
        if not all(piece in widths for piece in _pieces(node)):
            continue
        first = _pieces(node)[0]
        if chains and chains[-1][-1] is first and _is_gathered_only(first, node):
            chains[-1].append(node)
        else:
            chains.append([node])
    for chain in chains:
        if len(chain) > 1:
            _fill_buffer(graph, chain, widths)


def _pieces(node: fx.Node) -> list[fx.Node]:
    return list(cast(list[fx.Node], node.args[0]))


def _is_gathered_only(node: fx.Node, last: fx.Node) -> bool:
    return all(user is last or user.target is torch.index_select for user in node.users)


def _fill_buffer(graph: fx.Graph, chain: list[fx.Node], widths: dict[fx.Node, int]) -> None:
    pieces = [_pieces(chain[0]), *(_pieces(node)[1:] for node in chain[1:])]
    total = sum(widths[piece] for new in pieces for piece in new)
    base = pieces[0][0]
    with graph.inserting_before(chain[0]):
        sizes = [graph.call_method("size", (base, axis)) for axis in (0, 2, 3)]
        shape = (sizes[0], total, sizes[1], sizes[2])
        buffer = graph.call_method("new_empty", (base, shape))
    start = 0
    for node, new in zip(chain, pieces, strict=True):
        with graph.inserting_before(node):
            for piece in new:
                place = graph.call_function(torch.narrow, (buffer, 1, start, widths[piece]))
                graph.call_method("copy_", (place, piece))
                start += widths[piece]
    for node in reversed(chain):
        node.replace_all_uses_with(buffer)
        graph.erase_node(node)


def undo_buffers(graph: fx.Graph) -> None:
    """Rewrite buffers as the concatenations that they stand for."""
    for buffer in graph.find_nodes(op="call_method", target="new_empty"):
        writes = [user for user in buffer.users if user.target is torch.narrow]
        if not writes or not all(_is_written(place) for place in writes):
            continue
        _undo_buffer(graph, buffer, set(writes))


def _is_written(place: fx.Node) -> bool:
    return all(user.target == "copy_" and user.args[0] is place for user in place.users)


def _undo_buffer(graph: fx.Graph, buffer: fx.Node, writes: set[fx.Node]) -> None:
    value: Any = None
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if node in writes:
            (copy,) = node.users
            waiting.append(cast(fx.Node, copy.args[1]))
        elif node in buffer.users and node not in writes:
            if waiting:
                with graph.inserting_before(node):
                    pieces = waiting if value is None else [value, *waiting]
                    value = graph.call_function(torch.cat, (pieces, 1))
                waiting = []
            node.replace_input_with(buffer, value)
    for place in writes:
        (copy,) = place.users
        graph.erase_node(copy)
        graph.erase_node(place)
    sizes = cast(tuple[Any, ...], buffer.args[1])
    graph.erase_node(buffer)
    for size in sizes:
        if isinstance(size, fx.Node) and not size.users:
            graph.erase_node(size)
