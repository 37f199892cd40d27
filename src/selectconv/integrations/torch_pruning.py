"""ECDM as an importance for Torch-Pruning's pruners. Needs `selectconv[pruning]`.

Torch-Pruning removes a channel where it is made and from everyone who reads it. What that does to a
reader is the reader's row of Eq. (2), so a channel's score is its largest entry of nECDM among all
readers: what Algorithm 1 orders slots by.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from selectconv.checks import check_choice
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.moments import expected_power
from selectconv.extras import needing
from selectconv.graph.operations import TABLE, Family

with needing("torch_pruning", "selectconv.integrations.torch_pruning", "selectconv[pruning]"):
    import torch_pruning

Moments = tuple[Tensor, Tensor]  # mean and variance of each channel

_READS = (torch_pruning.prune_conv_in_channels, torch_pruning.prune_linear_in_channels)
# What Torch-Pruning knows of a function is the name of its gradient.
_ACTIVATIONS = [row for row in TABLE if row.family is Family.ACTIVATION and row.gradient]
# Pooling is taken to keep the mean: so it does where it averages; the maximum of a map's
# neighbours is larger, for all channels of a layer alike.
_POOLS = [row.gradient for row in TABLE if row.gradient and row.family is not Family.ACTIVATION]
# Torch-Pruning runs a model on a tensor's first image, without the batch, where it can: torch then
# wraps each conv in these.
_UNBATCHED = ("UnsqueezeBackward", "ConvolutionBackward", "SqueezeBackward")


class ECDMImportance(torch_pruning.importance.Importance):  # type: ignore[misc]
    """Score channels by the expected damage of removing them, without data.

    The mean E[X] of a layer's input is followed through Torch-Pruning's own graph: batch norms give
    mean and variance, activations are integrated, sums are added, convs and linear layers pass on
    what they read. The model's input is assumed to be normalised, and any Hardtanh to be a ReLU6,
    since Torch-Pruning does not tell them apart. Readers whose input cannot be followed are left
    out; a group without other readers has no score, and Torch-Pruning does not prune it.

    Args:
        damage: "mean" (the paper's Eq. (2)) or "rms", which also sees inputs of mean zero.

    Raises:
        ValueError: `damage` is unknown.

    Example:
        >>> import torch_pruning as tp
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        ... )
        >>> with torch.no_grad():
        ...     _ = model[3].weight[:, 5].zero_()
        >>> pruner = tp.pruner.BasePruner(
        ...     model, torch.zeros(1, 3, 8, 8), ECDMImportance(), pruning_ratio=1 / 8,
        ...     ignored_layers=[model[3]],
        ... )
        >>> pruner.step()
        >>> pruner.pruning_history()
        [['0', True, [5]]]
    """

    def __init__(self, damage: str = "mean") -> None:
        self.damage = check_choice("damage", damage, ("mean", "rms"))

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        """Score the channels of a group of coupled layers, one score for each of its indices."""
        place = {index: number for number, index in enumerate(group[0].idxs)}
        scores: Tensor | None = None
        for item in group:
            layer = item.dep.target.module
            moments = _input_moments(item.dep.target, {}) if item.dep.handler in _READS else None
            if moments is None:
                continue
            mean, var = moments
            weight, groups = _kernels(layer, len(mean))
            is_rms = self.damage == "rms"
            matrix = rms_damage(weight, mean, var, groups) if is_rms else ecdm(weight, mean, groups)
            largest = normalize_ecdm(matrix).amax(dim=1)
            scores = largest.new_zeros(len(place)) if scores is None else scores
            # After a flattening there are several columns for each channel.
            width = weight.shape[2] if isinstance(layer, nn.Linear) else 1
            read = torch.tensor([index // width for index in item.idxs], device=largest.device)
            roots = torch.tensor([place[index] for index in item.root_idxs], device=largest.device)
            scores.scatter_reduce_(0, roots, largest[read], "amax")
        return scores


def _kernels(layer: Any, channels: int) -> tuple[Tensor, int]:
    """Return a conv's or linear's weight as (O, I / groups, positions), and its groups."""
    if isinstance(layer, nn.Linear):
        return layer.weight.view(layer.out_features, channels, -1), 1
    weight: Tensor = layer.weight
    if layer.transposed:  # (I, O / groups, ...)
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(2), layer.groups


def _input_moments(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    """Find mean and variance of what a conv or linear reads."""
    inputs, layer = _inputs(node), node.module
    is_linear = isinstance(layer, nn.Linear)
    width = layer.in_features if is_linear else layer.in_channels
    if not inputs:  # the model's own, taken to be normalised
        return layer.weight.new_zeros(width), layer.weight.new_ones(width)
    moments = _moments(inputs[0], known)
    columns, rest = (0, 1) if moments is None else divmod(width, len(moments[0]))
    return moments if rest == 0 and (columns == 1 or is_linear) else None


def _moments(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    """Find mean and variance of each channel that a node of Torch-Pruning's graph gives out."""
    if node not in known:
        known[node] = None  # a loop cannot be followed
        if isinstance(node.module, _BatchNorm):
            source = BatchNormMean(node.module, None)
            known[node] = source.mean().float(), source.var().float()
        elif isinstance(node.module, _ConvNd | nn.Linear):
            known[node] = _after_layer(node.module, _input_moments(node, known))
        else:
            known[node] = _after_function(node, [_moments(one, known) for one in _inputs(node)])
    return known[node]


def _after_layer(layer: Any, before: Moments | None) -> Moments | None:
    """Pass moments through a conv or linear, as if its inputs were independent."""
    if before is None or getattr(layer, "transposed", False):
        return None
    mean, var = before
    weight, groups = _kernels(layer, len(mean))
    after = ecdm(weight, mean, groups).sum(dim=0)
    spread = ecdm(weight.square(), var, groups).sum(dim=0)
    return after if layer.bias is None else after + layer.bias, spread


def _after_function(node: Any, before: list[Moments | None]) -> Moments | None:
    """Pass moments through anything else that is known to Torch-Pruning or to the table."""
    found = [moments for moments in before if moments is not None]
    if not found or len(found) < len(before):
        return None
    operation, (mean, var) = _operation(node), found[0]
    for row in _ACTIVATIONS:
        if operation.startswith(row.gradient):
            first = expected_power(mean, var.sqrt(), row.function, 1)
            second = expected_power(mean, var.sqrt(), row.function, 2)
            return first, (second - first.square()).clamp(min=0)
    means, variances = zip(*found, strict=True)
    if isinstance(node.module, torch_pruning.ops._ConcatOp):
        return torch.cat(means), torch.cat(variances)
    if operation.startswith("AddBackward") and len(set(map(len, means))) == 1:
        return torch.stack(means).sum(dim=0), torch.stack(variances).sum(dim=0)
    is_reshaped = isinstance(node.module, torch_pruning.ops._ReshapeOp)
    is_kept = is_reshaped or any(name in operation for name in _POOLS)
    return found[0] if is_kept and len(found) == 1 else None


def _inputs(node: Any) -> list[Any]:
    """Return the nodes that a node reads."""
    inputs: list[Any] = []
    for other in node.inputs:
        if _operation(other).startswith(_UNBATCHED):
            inputs += _inputs(other)
        elif _operation(other) != "TBackward0":  # a linear's own weight, transposed
            inputs.append(other)
    return inputs


def _operation(node: Any) -> str:
    """Return the name of a function's gradient; empty for modules."""
    return str(getattr(node.module, "_grad_fn", ""))
