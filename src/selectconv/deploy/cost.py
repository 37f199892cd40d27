"""What a model costs: parameters and multiply-adds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from selectconv.deploy.layout import (
    BY_CHANNEL,
    Layout,
    channel_axis,
    is_read_for_type,
    plan_layout,
)
from selectconv.graph.channels import Mask
from selectconv.graph.dataflow import Dataflow, Kind, Operation, trace_dataflow
from selectconv.graph.example import evaluating
from selectconv.graph.operations import Family, argument, find_row

_AVERAGES = (Family.AVERAGE_POOL, Family.MEAN)


@dataclass(frozen=True)
class Cost:
    """What a model costs at inference, without closed slots and what only they read.

    Attributes:
        params: parameters, including those of batch norms. A module that is called twice counts
            once; a weight that two modules share counts twice, because `compress` keeps two.
        macs: multiply-adds of convs and linear layers, for the whole example.
        macs_cn: multiply-adds by CondenseNet's count, which adds the biases of linear layers and
            one for every input element of ReLU and average pooling.

    Example:
        >>> count(nn.Linear(4, 2), torch.zeros(1, 4))
        Cost(params=10, macs=8, macs_cn=10)
    """

    params: int
    macs: int
    macs_cn: int


def count(model: nn.Module, example_input: Any) -> Cost:
    """Count what a model costs at inference: the parts that `compress` keeps.

    Closed slots are not counted, nor are the filters and batch norm entries that no open slot
    reads. For a dense model, `params` are all parameters, and `macs` is half of what torch's own
    counter of operations returns. `CostCounter` traces the model only once: use it to count often,
    as the allocation changes.

    Args:
        model: any model, plain or selective. It does not change.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. The cost is
            that of the whole example: pass one image for the cost of one image.

    Raises:
        CompressionError: the model cannot be traced, or fails on the example.
        TypeError: `model` is not a module.

    Example:
        >>> import selectconv as sc, torch
        >>> model = sc.create_model("densenet40", growth_rate=4, units=(1, 1, 1), selective=True)
        >>> image = torch.zeros(1, 3, 32, 32)
        >>> dense = count(model, image)
        >>> dense.params == count(sc.create_model("densenet40", growth_rate=4, units=(1, 1, 1)),
        ...                       image).params
        True
        >>> model.blocks[0][0].spatial.conv.close(range(8))
        >>> count(model, image).macs < dense.macs
        True
    """
    return CostCounter(model, example_input).count()


class CostCounter:
    """Count a model again and again, as its slots open and close, after tracing it once.

    Args:
        model: as for `count`.
        example_input: as for `count`.

    Example:
        >>> import selectconv as sc
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), sc.SelectConv2d(8, 4, 1))
        >>> counter = CostCounter(model, torch.zeros(1, 3, 5, 5))
        >>> counter.count().macs == 25 * (3 * 8 + 8 * 4)
        True
        >>> model[2].close([0, 1])
        >>> counter.count().macs == 25 * (3 * 6 + 6 * 4)
        True
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self.flow = trace_dataflow(model, example_input)

    def count(self, unread: Mapping[str, Mask] | None = None, *, is_exact: bool = False) -> Cost:
        """Count the model with its present allocation.

        Args:
            unread: by name of a layer that is not selective, the channels of its input that it
                does not read. None: as its weights are.
            is_exact: count what is read, also where `compress` would read more than gather it.
        """
        flow = self.flow
        named = None if unread is None else {
            node: unread[op.name] for node, op in flow.operations.items() if op.name in unread
        }  # fmt: skip
        layout = plan_layout(flow, unread=named, is_exact=is_exact)
        params: dict[object, int] = {}
        macs = extra = 0
        for node, op in flow.operations.items():
            if node not in layout.kept:
                continue
            params.update(_params(flow, op, layout))
            if op.kind is Kind.CONV:
                batch, _, *after = op.shape
                before = flow.operations[argument(node)].shape[2:]
                macs += batch * sum(
                    math.prod(after) * part.num_weights
                    + math.prod(before) * part.num_stencil_weights
                    for part in layout.parts[node]
                )
            elif op.kind in (Kind.LINEAR, Kind.TRANSPOSED):
                before, kept = argument(node), len(layout.kept[node])
                pairs = op.channels * flow.operations[before].channels
                macs += op.macs // pairs * kept * len(layout.kept[before])
                has_bias = op.kind is Kind.LINEAR and getattr(op.module, "bias", None) is not None
                extra += kept if has_bias else 0
            else:  # operations that are left alone
                macs += op.macs
            row = find_row(node, op.module)
            if op.kind is Kind.CHANNELWISE and (row.family in _AVERAGES or "relu" in row.names):
                shape = flow.operations[argument(node)].shape
                extra += math.prod(shape) // shape[1] * len(layout.kept[node])
        return Cost(sum(params.values()), macs, macs + extra)


def _params(flow: Dataflow, op: Operation, layout: Layout) -> dict[object, int]:
    """Count the parameters of an operation, by a key that tells shared ones."""
    kept = len(layout.kept[op.node])
    if op.kind is Kind.CONV:
        weights = sum(p.num_weights + p.num_stencil_weights for p in layout.parts[op.node])
        has_bias = getattr(op.module, "bias", None) is not None
        return {id(op.module): weights + (kept if has_bias else 0)}
    if op.kind in (Kind.LINEAR, Kind.TRANSPOSED) and op.module is not None:
        before = argument(op.node)
        read = len(layout.kept[before]), flow.operations[before].channels
        return {
            id(p): p.numel() // op.channels * kept * read[0] // read[1] if p.ndim > 1 else kept
            for p in op.module.parameters()
        }
    if op.module is not None:
        return {
            id(p): p.numel() // op.channels * kept
            if op.kind in BY_CHANNEL and p.shape[:1] == (op.channels,)
            else p.numel()
            for p in op.module.parameters()
        }
    params: dict[object, int] = {}
    for other in op.node.all_input_nodes:
        tensor = flow.operations[other]
        is_parameter = tensor.kind is Kind.TENSOR and isinstance(other.meta["value"], nn.Parameter)
        if is_parameter and not is_read_for_type(other):
            axis = channel_axis(flow, op, other) if op.kind is Kind.CHANNELWISE else None
            width = math.prod(tensor.shape) // (1 if axis is None else tensor.shape[axis])
            params[other, axis and kept] = width if axis is None else width * kept
    return params


def count_params(model: nn.Module) -> int:
    """Count a model's parameters, without buffers; shared ones count once.

    Example:
        >>> count_params(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)))
        232
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, shape: Sequence[int]) -> int:
    """Count the multiply-adds of a plain model's convs and linears for one input.

    It need not be possible to trace the model, which runs without data and in evaluation mode.
    Additions of biases, batch norm, activations and pooling count 0.

    Args:
        model: a model without selective layers.
        shape: of one input, without the batch: (C, H, W).

    Example:
        >>> count_macs(nn.Conv2d(3, 8, 3, padding=1), (3, 32, 32)) == 32 * 32 * 8 * 3 * 9
        True
        >>> count_macs(nn.Linear(64, 10), (64,))
        640
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    counter = FlopCounterMode(display=False)
    with evaluating(model), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), counter:
        model(torch.empty(1, *shape, dtype=like.dtype, device=like.device))
    return int(counter.get_total_flops()) // 2  # a multiply-add is two of its operations
