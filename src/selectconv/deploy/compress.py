"""`compress`: a physically smaller model of standard operations, with the same outputs."""

import copy
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from selectconv.checks import check_count, warn
from selectconv.core.models import unwrap
from selectconv.deploy.layout import (
    Layout,
    channel_axis,
    is_channel_operand,
    is_in_module,
    is_read_for_type,
    plan_layout,
)
from selectconv.deploy.parts import Channels, Part, conv_weight, stencil_weight
from selectconv.errors import CompressionError
from selectconv.graph.dataflow import Dataflow, Kind, Operation, trace_dataflow
from selectconv.graph.example import as_arguments, evaluating
from selectconv.graph.operations import argument
from selectconv.graph.tracer import first_line

RTOL = 1e-4
_ROUNDINGS = 8  # what the other order of its sums may cost a network in float16 or bfloat16


def compress(
    model: nn.Module, example_input: Any, *, round_to: int | None = None
) -> fx.GraphModule:
    """Build a smaller plain model that computes what a selective one computes at inference.

    Closed slots are removed, and with them the filters and batch norm entries that no open slot
    reads, through concatenation, addition, pooling, batch norm and activations. A depthwise conv
    shifts the input of re-allocated slots. Only standard modules and functions of torch are left.
    A conv that reads some of its input's channels gathers them if that is faster; otherwise its
    weights for the other channels are zero. The outputs of both models are compared on the example
    before the new model is returned; if only rounding makes them differ, a warning says so.

    The new model shares nothing with the old one, which does not change. It is in evaluation mode
    and has no dropout. It is one graph of torch's own modules, so it can be trained, moved, cast,
    copied, scripted, quantized, exported and saved (`save_compressed`).

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
    small = _build(model, example_input, round_to)
    difference = _find_difference(model, small, example_input)
    if difference is not None:
        if not _agrees_in_float64(model, example_input, round_to):
            raise CompressionError(
                f"{difference}; tracing does not see hooks, nor a forward that depends on values. "
                "The masked model still works."
            )
        warn(f"{difference}. In float64 they agree: the network magnifies rounding errors.")
    return small


def _build(model: nn.Module, example_input: Any, round_to: int | None) -> fx.GraphModule:
    flow = trace_dataflow(model, example_input)
    with torch.no_grad():
        return _Builder(flow, plan_layout(flow, round_to)).build()


class _Builder:
    """Writes the graph and the modules of a compressed model."""

    def __init__(self, flow: Dataflow, layout: Layout) -> None:
        self.flow = flow
        self.layout = layout
        self.graph = fx.Graph()
        self.made: dict[str, Any] = {}  # modules and tensors by name
        self.new: dict[fx.Node, fx.Node] = {}
        self.gathers: dict[tuple[fx.Node, bytes], fx.Node] = {}
        self.borrowed: list[str] = []  # tensors of modules that are read by themselves, too

    def build(self) -> fx.GraphModule:
        for node, op in self.flow.operations.items():
            if node in self.layout.kept and op.kind is not Kind.TENSOR:
                self.new[node] = self._write(op)
        for name in self.borrowed:
            owner, _, attribute = name.rpartition(".")
            self.made[name] = getattr(self.made[owner], attribute)
        return fx.GraphModule(self.made, self.graph, class_name="Compressed").eval()

    def _write(self, op: Operation) -> fx.Node:
        if op.kind is Kind.CONV:
            return self._write_conv(op)
        if op.kind is Kind.CONCAT:
            return self._write_concat(op)
        if op.kind is Kind.CHANNEL_PAD:
            return self._write_channel_pad(op)
        kept = self.layout.kept[op.node] if op.kind is not Kind.OUTPUT else None
        if op.module is not None:
            target = self._hold(str(op.node.target), lambda: _narrow_module(op, kept))
            return self._call(op, target)
        return self._call(op, op.node.target)

    def _call(self, op: Operation, target: Any) -> fx.Node:
        """Write the same call, with the inputs brought to the channels that it works on."""
        args = fx.map_arg(op.node.args, lambda other: self._operand(op, other))
        kwargs = fx.map_arg(op.node.kwargs, lambda other: self._operand(op, other))
        return self.graph.create_node(
            op.node.op, target, cast(Any, args), cast(Any, kwargs), op.node.name
        )

    def _operand(self, op: Operation, other: fx.Node) -> fx.Node:
        wanted = self.layout.wanted.get(op.node)
        if self.flow.operations[other].kind is Kind.TENSOR:
            axis = None if wanted is None else channel_axis(self.flow, op, other)
            return self._tensor(other, axis, wanted)
        if wanted is None or not is_channel_operand(self.flow, op, other):
            return self.new[other]
        return self._gather(other, wanted)

    def _tensor(self, other: fx.Node, axis: int | None, wanted: Channels | None) -> fx.Node:
        name, value = str(other.target), self.flow.tensor(other)
        if is_in_module(self.flow, self.layout, other):
            if is_read_for_type(other):
                self.borrowed.append(name)
                return self.graph.get_attr(name)
            name = name.replace(".", "_")  # the module has a narrower one of its own
        if axis is not None and wanted is not None and len(wanted) < value.shape[axis]:
            index = torch.from_numpy(wanted).to(value.device)
            name, part = f"{name}_{len(self.made)}", value.detach().index_select(axis, index)
        else:
            part = value.detach().clone()
        if isinstance(value, nn.Parameter):
            part = nn.Parameter(part, requires_grad=part.is_floating_point())
        self.made.setdefault(name, part)
        return self.graph.get_attr(name)

    def _value(self, node: fx.Node) -> fx.Node:
        """Return a value of the new graph; parameters and buffers are written as they are read."""
        is_tensor = self.flow.operations[node].kind is Kind.TENSOR
        return self._tensor(node, None, None) if is_tensor else self.new[node]

    def _gather(self, other: fx.Node, wanted: Channels) -> fx.Node:
        """Bring a value to these channels; channels that it lacks (-1) may hold anything."""
        kept = self.layout.kept[other]
        if np.array_equal(kept, wanted):
            return self._value(other)
        place = np.searchsorted(kept, np.maximum(wanted, kept[0]))
        return self._select(self._value(other), place)

    def _select(self, x: fx.Node, place: Channels) -> fx.Node:
        key = (x, place.tobytes())
        if key not in self.gathers:
            device = next(self.flow.root.parameters()).device
            name = f"channels_{len(self.gathers)}"
            self.made[name] = torch.from_numpy(place).to(device)
            index = self.graph.get_attr(name)
            self.gathers[key] = self.graph.call_function(torch.index_select, (x, 1, index))
        return self.gathers[key]

    def _write_conv(self, op: Operation) -> fx.Node:
        name, parts = str(op.node.target), self.layout.parts[op.node]
        pieces = [self._write_part(op, part) for part in parts]
        x = pieces[0]
        if len(pieces) > 1:
            x = self.graph.call_function(torch.cat, (pieces, 1))
            still, shifted = (part.sources for part in parts)
            if len(still) > 1:  # the conv wants the channels by group
                order = np.concatenate(
                    [
                        np.arange(still.size).reshape(still.shape),
                        still.size + np.arange(shifted.size).reshape(shifted.shape),
                    ],
                    axis=1,
                )
                x = self._select(x, order.reshape(-1))
        return self.graph.call_module(self._hold(name, lambda: _conv(parts)), (x,))

    def _write_part(self, op: Operation, part: Part) -> fx.Node:
        """Write what a conv reads of its input."""
        before = argument(op.node, 0, "input")
        if not part.is_gathered:
            return self._value(before)
        x = self._gather(before, part.sources.reshape(-1))
        if part.has_stencil:
            stencil = self._hold(f"{op.node.target}_stencil", lambda: _stencil(part))
            x = self.graph.call_module(stencil, (x,))
        return x

    def _hold(self, name: str, make: Any) -> str:
        """Make a module once; shared ones are called by the same name again."""
        if name not in self.made:
            self.made[name] = make()
        return name

    def _write_concat(self, op: Operation) -> fx.Node:
        pieces = [self._gather(other, wanted) for other, wanted in self.layout.pieces[op.node]]
        if len(pieces) == 1:
            return pieces[0]
        return self.graph.call_function(torch.cat, (pieces, 1))

    def _write_channel_pad(self, op: Operation) -> fx.Node:
        before = argument(op.node, 0, "input")
        kept, inner = self.layout.kept[op.node], self.layout.kept[before]
        pad = argument(op.node, 1, "pad")
        front = int((kept < pad[-2]).sum())
        new_pad = (*pad[:-2], front, len(kept) - len(inner) - front)
        if not any(new_pad):
            return self._value(before)
        return self.graph.call_function(F.pad, (self._value(before), new_pad))


def _narrow_module(op: Operation, kept: Channels | None) -> nn.Module:
    """Copy a module, with the kept channels only where it has parameters for each."""
    assert op.module is not None
    new = copy.deepcopy(op.module)
    for module in new.modules():  # hooks are not part of a plain model
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    if kept is None or len(kept) == op.channels:
        return new
    index = torch.from_numpy(kept)
    if op.kind is Kind.LINEAR:
        assert isinstance(new, nn.Linear)
        new.out_features = len(kept)
    elif isinstance(new, _BatchNorm):
        new.num_features = len(kept)
    elif isinstance(new, nn.PReLU) and new.num_parameters > 1:
        new.num_parameters = len(kept)
    for name, value in (*new._parameters.items(), *new._buffers.items()):
        if value is not None and value.ndim and len(value) == op.channels:
            part = value.detach()[index.to(value.device)]
            setattr(new, name, nn.Parameter(part) if isinstance(value, nn.Parameter) else part)
    return new


def _conv(parts: list[Part]) -> nn.Module:
    """Make the plain conv that reads these parts."""
    old, filters, bias = parts[0].conv, parts[0].filters, None
    if old.bias is not None:
        bias = old.bias.detach()[torch.from_numpy(filters.reshape(-1)).to(old.bias.device)]
    settings: dict[str, Any] = {
        name: getattr(old, name) for name in ("padding", "padding_mode", "stride", "dilation")
    }
    weight = torch.cat([conv_weight(part) for part in parts], dim=1)
    return _new_conv(weight, bias, len(filters), settings)


def _stencil(part: Part) -> nn.Module:
    """Make the depthwise conv that shifts what a part reads."""
    weight = stencil_weight(part)
    return _new_conv(weight, None, len(weight), {"padding": part.reach})


def _new_conv(
    weight: Tensor, bias: Tensor | None, groups: int, settings: dict[str, Any]
) -> nn.Module:
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


def _agrees_in_float64(model: nn.Module, example_input: Any, round_to: int | None) -> bool:
    """Return whether rounding alone makes the outputs differ: it does not in float64."""
    try:
        exact, example = to_float64(model, example_input)
        return _find_difference(exact, _build(exact, example, round_to), example) is None
    except Exception:  # a model that cannot be copied, or that makes tensors of its own dtype
        return False


def to_float64(model: nn.Module, example_input: Any) -> tuple[nn.Module, Any]:
    """Copy a model, and arguments for it, as float64 on the CPU, since MPS has none."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().cpu().double() if value.is_floating_point() else value.cpu()

    return copy.deepcopy(model).cpu().double(), tree_map(convert, example_input)


def _find_difference(model: nn.Module, small: nn.Module, example_input: Any) -> str | None:
    """Say by how much the outputs differ on the example; None: they agree."""
    args, kwargs = as_arguments(example_input)
    with torch.no_grad(), evaluating(model):
        want = model(*args, **kwargs)
        try:
            got = small(*args, **kwargs)
        except Exception as error:
            raise CompressionError(
                f"the compressed model fails with {first_line(error)}; tracing does not see "
                "hooks. The masked model still works."
            ) from error
    wants, gots = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (want, got)
    )
    for number, (one, other) in enumerate(zip(wants, gots, strict=True)):
        if bool(one.isnan().any()):
            raise CompressionError(
                f"output {number} of the model itself is NaN on the example, so the compressed one "
                "cannot be compared with it: look for NaN in `example_input` and in the weights."
            )
        difference, most = largest_difference(one, other), tolerance(one.dtype, RTOL)
        if difference > most:
            return (
                f"output {number} of the compressed model differs from the model's by "
                f"{difference:.1e} of its size, more than {most:g}"
            )
    return None


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


def tolerance(dtype: torch.dtype, usual: float) -> float:
    """Return the relative difference that is accepted: more for float16 and bfloat16."""
    return max(usual, _ROUNDINGS * torch.finfo(dtype).eps) if dtype.is_floating_point else usual
