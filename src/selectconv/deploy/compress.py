"""`compress`: a physically smaller model of standard operations, with the same outputs."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map_only

from selectconv.checks import check_count, warn
from selectconv.core.models import unwrap
from selectconv.deploy.layout import (
    BY_CHANNEL,
    Layout,
    channel_axis,
    is_read_for_type,
    plan_layout,
)
from selectconv.deploy.parts import Channels, Part, conv_weight, stencil_weight
from selectconv.errors import CompressionError
from selectconv.graph.dataflow import (
    Dataflow,
    Kind,
    Operation,
    is_channel_operand,
    trace_dataflow,
)
from selectconv.graph.example import as_arguments, evaluating
from selectconv.graph.operations import argument

RTOL = 1e-4
_ROUNDINGS = 8  # what the other order of its sums may cost a network


@torch.inference_mode(False)  # what is made there cannot be trained
def compress(
    model: nn.Module, example_input: Any, *, round_to: int | None = None
) -> fx.GraphModule:
    """Build a smaller plain model that computes what a selective one computes at inference.

    Closed slots are removed, and with them the filters and batch norm entries that no open slot
    reads, through concatenation, addition, pooling, batch norm and activations. The input of
    re-allocated slots is shifted: by a copy if the shift is whole pixels, otherwise by a depthwise
    conv. Only standard modules and functions of torch are left.
    A conv that reads some of its input's channels gathers them if that is faster; otherwise its
    weights for the other channels are zero. The outputs of both models are compared on the example
    before the new model is returned; if only rounding makes them differ, a warning says so.

    The new model shares nothing with the old one, which does not change. It is in evaluation mode
    and has no dropout. It is one graph of torch's own modules, so it can be trained, moved, cast,
    copied, scripted, quantized, exported and saved (`save_compressed`). It returns the model's
    containers, and has those of its own attributes that are numbers, strings, or lists of them,
    such as `out_channels`: it can replace a part of a model.

    Args:
        model: any model that torch.fx can trace, plain or selective.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. The new model
            accepts other batch sizes, and other map sizes if the model does and no shift is larger
            than a map. A forward that depends on shapes is traced for the example's shapes, with
            a warning.
        round_to: round numbers of channels up to a multiple of this, as far as there are channels.
            Grouped convs that are not depthwise are not rounded. None: round only the channels of
            depthwise convs and of shifted slots, to multiples of 8, if that adds little. 1: round
            nothing.

    Raises:
        CompressionError: the model depends on values, cannot be traced, or fails on the example,
            or the smaller model would compute something else.
        TypeError, ValueError: an argument is not accepted.

    Example:
        >>> import selectconv as sc
        >>> model = sc.create_model("densenet40", growth_rate=4, units=(1, 1, 1), selective=True)
        >>> model.blocks[0][0].spatial.conv.close(range(8))
        >>> x = torch.randn(2, 3, 16, 16)
        >>> small = compress(model, x)
        >>> small.get_submodule("blocks.0.0.spatial.conv")
        Conv2d(8, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
        >>> torch.testing.assert_close(small(x), model.eval()(x))
    """
    if round_to is not None:
        check_count("round_to", round_to, 1)
    model = unwrap(model)
    flow = trace_dataflow(model, example_input)
    args, kwargs = as_arguments(example_input)
    with torch.no_grad(), evaluating(model):
        small = _Builder(flow, plan_layout(flow, round_to)).build()
        wanted, got = tensors_in(model(*args, **kwargs)), tensors_in(small(*args, **kwargs))
    if any(bool(output.isnan().any()) for output in wanted):
        raise CompressionError(
            "an output of the model itself is NaN on the example, so the compressed model cannot "
            "be compared with it: look for NaN in `example_input` and in the weights."
        )
    check_same(
        model, (args, kwargs), wanted, got, rtol=RTOL, error=CompressionError,
        what="of the compressed model (tracing does not see hooks) differs from the model's",
    )  # fmt: skip
    keep_attributes(small, plain_attributes(model))
    return small


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return a model's own attributes that are numbers, strings, or tuples and lists of them."""
    return {
        name: value
        for name, value in vars(model).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def keep_attributes(small: fx.GraphModule, attributes: dict[str, Any]) -> None:
    """Give a compressed model, and so its copies, the attributes that hide nothing of its own."""
    kept = {name: value for name, value in attributes.items() if not hasattr(small, name)}
    small.meta["_user_preserved_attributes"] = kept  # torch.fx copies no others
    for name, value in copy.deepcopy(kept).items():
        setattr(small, name, value)


class _Builder:
    """Writes the graph and the modules of a compressed model."""

    def __init__(self, flow: Dataflow, layout: Layout) -> None:
        self.flow = flow
        self.layout = layout
        self.graph = fx.Graph()
        self.made: dict[str, Any] = {}  # modules and tensors by name
        self.new: dict[fx.Node, fx.Node] = {}
        self.written: dict[Any, fx.Node] = {}  # gathers and tensors, each of them once

    def build(self) -> fx.GraphModule:
        for node, op in self.flow.operations.items():
            if node in self.layout.kept and op.kind is not Kind.TENSOR:
                self.new[node] = self._write(op)
        return fx.GraphModule(self.made, self.graph, class_name="Compressed").eval()

    def _write(self, op: Operation) -> fx.Node:
        if op.kind is Kind.CONV:
            return self._write_conv(op)
        if op.kind is Kind.CONCAT:
            return self._join([self._value(other) for other in self.layout.pieces[op.node]])
        if op.kind is Kind.CHANNEL_PAD:
            return self._write_channel_pad(op)
        if op.kind is Kind.FLATTEN:
            return self.graph.call_function(torch.flatten, (self._value(argument(op.node)), 1))
        if op.module is not None:  # one that is called twice is made once
            is_dense = op.kind in (Kind.LINEAR, Kind.TRANSPOSED)
            inputs = self.layout.kept[argument(op.node)] if is_dense else None
            module = _narrow_module(op.module, op.channels, self.layout.kept[op.node], inputs)
            self.made.setdefault(str(op.node.target), module)
        args, kwargs = fx.map_arg(
            (op.node.args, op.node.kwargs), lambda other: self._operand(op, other)
        )
        return self.graph.create_node(op.node.op, op.node.target, args, kwargs, op.node.name)

    def _operand(self, op: Operation, other: fx.Node) -> fx.Node:
        """Bring an input to the channels that an operation works on."""
        kept = self.layout.kept[op.node]
        if op.kind in BY_CHANNEL and self.flow.operations[other].kind is Kind.TENSOR:
            axis = channel_axis(self.flow, op, other)
            return self._tensor(other) if axis is None else self._tensor(other, axis, kept)
        if op.kind in BY_CHANNEL and is_channel_operand(self.flow, op, other):
            return self._gather(other, kept)
        return self._value(other)

    def _value(self, node: fx.Node) -> fx.Node:
        """Return a value of the new graph; parameters and buffers are written as they are read."""
        is_tensor = self.flow.operations[node].kind is Kind.TENSOR
        return self._tensor(node) if is_tensor else self.new[node]

    def _tensor(self, node: fx.Node, axis: int = 0, wanted: Channels | None = None) -> fx.Node:
        """Write a parameter or buffer that is read by itself, and not by a module."""
        value, name = node.meta["value"], str(node.target).replace(".", "_")
        key = (name, axis, None if wanted is None else wanted.tobytes())
        if key in self.written:
            return self.written[key]
        part = value.detach().clone()
        if wanted is not None:
            part = part.index_select(axis, torch.from_numpy(wanted).to(part.device))
        if is_read_for_type(node):
            part = part.new_empty(0)
        elif isinstance(value, nn.Parameter):
            part = nn.Parameter(part, requires_grad=part.is_floating_point())
        name = f"{name}_{len(self.made)}" if name in self.made else name
        self.made[name] = part
        self.written[key] = self.graph.get_attr(name)
        return self.written[key]

    def _gather(self, other: fx.Node, wanted: Channels) -> fx.Node:
        """Bring a value to these channels; channels that it lacks (-1) may hold anything."""
        kept = self.layout.kept[other]
        if np.array_equal(kept, wanted):
            return self._value(other)
        return self._select(self._value(other), np.searchsorted(kept, np.maximum(wanted, kept[0])))

    def _select(self, x: fx.Node, place: Channels) -> fx.Node:
        key = (x, place.tobytes())
        if key not in self.written:
            name = f"channels_{len(self.written)}"
            self.made[name] = torch.from_numpy(place).to(next(self.flow.root.parameters()).device)
            index = self.graph.get_attr(name)
            self.written[key] = self.graph.call_function(torch.index_select, (x, 1, index))
        return self.written[key]

    def _join(self, pieces: list[fx.Node]) -> fx.Node:
        return pieces[0] if len(pieces) == 1 else self.graph.call_function(torch.cat, (pieces, 1))

    def _write_conv(self, op: Operation) -> fx.Node:
        parts = self.layout.parts[op.node]
        x = self._join([piece for part in parts for piece in self._write_part(op, part)])
        if len(parts[0].sources) > 1 and (len(parts) > 1 or parts[0].offsets is not None):
            ends = np.cumsum([part.sources.size for part in parts])
            by_group = [  # the conv wants the channels by group
                end - len(part.order) + np.argsort(part.order).reshape(part.sources.shape)
                for part, end in zip(parts, ends, strict=True)
            ]
            x = self._select(x, np.concatenate(by_group, axis=1).reshape(-1))
        self.made.setdefault(str(op.node.target), _conv(parts))
        return self.graph.call_module(str(op.node.target), (x,))

    def _write_part(self, op: Operation, part: Part) -> list[fx.Node]:
        """Write what a conv reads of its input, in pieces."""
        if not part.is_gathered:
            return [self._value(argument(op.node))]
        if part.offsets is not None:
            return self._write_copies(argument(op.node), part, part.offsets[part.order])
        x = self._gather(argument(op.node), part.sources.reshape(-1))
        if not part.reach:
            return [x]
        name, weight = f"{op.node.target}_stencil", stencil_weight(part)  # a depthwise conv shifts
        self.made.setdefault(name, _new_conv(weight, None, len(weight), padding=part.reach))
        return [self.graph.call_module(name, (x,))]

    def _write_copies(self, before: fx.Node, part: Part, offsets: Channels) -> list[fx.Node]:
        """Write channels shifted by whole pixels: a piece for each distinct offset.

        A pad adds zeros on one side and, being negative there, cuts as much off the other: a pixel
        at a time, which any map has.
        """
        distinct, place = np.unique(part.sources.reshape(-1)[part.order], return_inverse=True)
        sources = self._gather(before, distinct)  # once: slow where channels lie last
        starts = [0, *(np.flatnonzero(np.any(np.diff(offsets, axis=0), axis=1)) + 1).tolist()]
        pieces = []
        for start, stop in pairwise([*starts, len(offsets)]):
            piece, left = self._select(sources, place[start:stop]), offsets[start]
            while left.any():
                frame = [end for step in np.sign(left[::-1]).tolist() for end in (-step, step)]
                piece = self.graph.call_function(F.pad, (piece, frame))
                left = left - np.sign(left)
            pieces.append(piece)
        return pieces

    def _write_channel_pad(self, op: Operation) -> fx.Node:
        before, pad = argument(op.node), argument(op.node, 1, "pad")
        kept, inner = self.layout.kept[op.node], self.layout.kept[before]
        front = int((kept < pad[-2]).sum())
        new_pad = (*pad[:-2], front, len(kept) - len(inner) - front)
        return self.graph.call_function(F.pad, (self._value(before), new_pad))


def _narrow_module(
    module: nn.Module, channels: int, kept: Channels, inputs: Channels | None
) -> nn.Module:
    """Copy a module, with the kept channels only where it has parameters for each.

    Args:
        module: what to copy.
        channels: the number of its outputs.
        kept: those of them that are kept.
        inputs: of a linear layer or a transposed conv, the channels that its input keeps.
    """
    new = copy.deepcopy(module)
    axis = 1 if inputs is not None and isinstance(new, _ConvNd) else 0  # of a weight's outputs
    if isinstance(new, nn.GroupNorm):
        new.num_groups = new.num_groups * len(kept) // channels
    for name in ("out_features", "out_channels", "num_features", "num_channels", "num_parameters"):
        if getattr(new, name, None) == channels:
            setattr(new, name, len(kept))
    if inputs is not None:
        setattr(new, "in_channels" if axis else "in_features", len(inputs))
    for name, value in (*new._parameters.items(), *new._buffers.items()):
        if value is None or not value.ndim:
            continue
        part = value.detach()
        if value.ndim > 1 and inputs is not None:
            part = _narrow(part, 1 - axis, inputs)
        along = axis if value.ndim > 1 else 0
        if part.shape[along] == channels:
            part = _narrow(part, along, kept)
        if part.shape != value.shape:
            setattr(new, name, nn.Parameter(part) if isinstance(value, nn.Parameter) else part)
    return new


def _narrow(value: Tensor, axis: int, kept: Channels) -> Tensor:
    return value.index_select(axis, torch.from_numpy(kept).to(value.device))


def _conv(parts: list[Part]) -> nn.Module:
    """Make the plain conv that reads these parts."""
    old, filters, bias = parts[0].conv, parts[0].filters, None
    if old.bias is not None:
        bias = old.bias.detach()[torch.from_numpy(filters.reshape(-1)).to(old.bias.device)]
    weight = torch.cat([conv_weight(part) for part in parts], dim=1)
    names = ("padding", "padding_mode", "stride", "dilation")
    return _new_conv(weight, bias, len(filters), **{name: getattr(old, name) for name in names})


def _new_conv(weight: Tensor, bias: Tensor | None, groups: int, **settings: Any) -> nn.Module:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.ndim - 3]
    out_channels, inputs, *kernel_size = weight.shape
    new: nn.Module = kind(
        inputs * groups, out_channels, tuple(kernel_size), groups=groups, bias=bias is not None,
        device="meta", **settings,
    )  # fmt: skip
    new.weight = nn.Parameter(weight)
    if bias is not None:
        new.bias = nn.Parameter(bias)
    return new


def check_same(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    wanted: list[Tensor],
    got: list[Tensor],
    *,
    rtol: float,
    what: str,
    error: type[Exception],
) -> None:
    """Compare outputs with those of a model; warn where no more than rounding makes them differ.

    Args:
        model: the model.
        arguments: with which it was called, by place and by name.
        wanted: the model's outputs.
        got: those to compare with them.
        rtol: the relative difference that is accepted; more is in float16 and bfloat16.
        what: says what `got` are, and ends the sentence "output 0 ...".
        error: is raised where they differ.
    """
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        difference = largest_difference(one, other)
        is_float = one.is_floating_point()
        most = max(rtol, _ROUNDINGS * torch.finfo(one.dtype).eps) if is_float else rtol
        if difference <= most:
            continue
        words = f"output {number} {what} by {difference:.1e} of its size, more than {most:g}"
        if not _is_rounding(model, arguments, number, one, other):
            raise error(f"{words}. Nothing was returned or written.")
        warn(f"{words}. It differs as much from float64: the network magnifies rounding errors.")


def largest_difference(want: Tensor, got: Tensor) -> float:
    """Return the largest difference, relative to the largest value that is wanted."""
    if want.shape != got.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    want, got = want.cpu().double(), got.cpu().double()  # MPS has no float64
    differences = torch.where(want == got, 0.0, want - got).abs()  # infinities may be equal
    worst = differences.max() / torch.where(want.isfinite(), want, 0.0).abs().max().clamp(min=1e-12)
    return float(worst) if not torch.isnan(worst) else float("inf")


def tensors_in(outputs: Any) -> list[Tensor]:
    """List the tensors among a model's outputs."""
    return [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]


def _is_rounding(
    model: nn.Module, arguments: tuple[Any, Any], number: int, wanted: Tensor, got: Tensor
) -> bool:
    """Return whether a model's output is about as far from that in float64 as `got` is."""
    try:
        exact = copy.deepcopy(model).cpu().double()  # on the CPU: MPS has no float64
        on_cpu = tree_map_only(Tensor, lambda value: value.detach().cpu(), arguments)
        args, kwargs = tree_map_only(
            Tensor, lambda value: value.double() if value.is_floating_point() else value, on_cpu
        )
        with torch.no_grad(), evaluating(exact):
            output = tensors_in(exact(*args, **kwargs))[number]
    except Exception:  # a model that cannot be copied, or that makes tensors of its own dtype
        return False
    return largest_difference(output, got) <= _ROUNDINGS * largest_difference(output, wanted)
