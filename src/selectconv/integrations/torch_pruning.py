"""ECDM as an importance for Torch-Pruning's pruners. Needs `selectconv[pruning]`.

Torch-Pruning removes a channel where it is made and from everyone who reads it. What that does to a
reader is the reader's row of Eq. (2), so a channel's score is its largest entry of nECDM among all
readers: what Algorithm 1 orders slots by.
"""

from typing import Any

import torch
from torch import Tensor, nn

from selectconv.checks import check_choice
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.moments import expected_activation, expected_square_activation
from selectconv.extras import needing
from selectconv.graph.operations import TABLE, Family

with needing("torch_pruning", "selectconv.integrations.torch_pruning", "selectconv[pruning]"):
    import torch_pruning

DAMAGES = ("mean", "rms")

Moments = tuple[Tensor, Tensor]  # mean and variance of each channel

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
        self.damage = check_choice("damage", damage, DAMAGES)

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        """Score the channels of a group of coupled layers, one score for each of its indices."""
        place = {index: number for number, index in enumerate(group[0].idxs)}
        scores: Tensor | None = None
        for item in group:
            if not _reads(item.dep):
                continue
            moments = _input_moments(item.dep.target, {})
            if moments is None:
                continue
            largest = _largest_damage(item.dep.target.module, moments, self.damage)
            if scores is None:
                scores = largest.new_zeros(len(place))
            # After a flattening there are several columns for each channel.
            width = _num_inputs(item.dep.target.module) // len(largest)
            read = torch.tensor([index // width for index in item.idxs], device=largest.device)
            roots = torch.tensor([place[index] for index in item.root_idxs], device=largest.device)
            scores.scatter_reduce_(0, roots, largest[read], "amax")
        return scores


def _reads(dep: Any) -> bool:
    """Return whether a dependency takes inputs away from a conv or a linear."""
    return dep.handler in (
        torch_pruning.prune_conv_in_channels,
        torch_pruning.prune_linear_in_channels,
    )


def _num_inputs(layer: nn.Module) -> int:
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert isinstance(width, int)
    return width


def _kernels(layer: nn.Module, channels: int) -> tuple[Tensor, int]:
    """Return a conv's or linear's weight as (O, I / groups, positions), and its groups."""
    weight = layer.get_parameter("weight")
    if isinstance(layer, nn.Linear):
        return weight.view(weight.shape[0], channels, -1), 1
    groups = layer.groups
    assert isinstance(groups, int)
    if layer.transposed:  # (I, O / groups, ...)
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(2), groups


def _largest_damage(layer: nn.Module, moments: Moments, damage: str) -> Tensor:
    """Compute the largest entry of nECDM of each channel that a layer reads."""
    mean, var = moments
    weight, groups = _kernels(layer, len(mean))
    if damage == "rms":
        matrix = rms_damage(weight, mean, var, groups)
    else:
        matrix = ecdm(weight, mean, groups)
    return normalize_ecdm(matrix).amax(dim=1)


def _input_moments(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    """Find mean and variance of what a conv or linear reads."""
    layer = node.module
    inputs = _inputs(node)
    if not inputs:
        zeros = layer.get_parameter("weight").new_zeros(_num_inputs(layer))
        return zeros, zeros + 1
    moments = _moments(inputs[0], known)
    width = _num_inputs(layer)
    if moments is None or width % len(moments[0]):
        return None
    is_flattened = isinstance(layer, nn.Linear)
    return moments if is_flattened or len(moments[0]) == width else None


def _moments(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    """Find mean and variance of each channel that a node of Torch-Pruning's graph gives out."""
    if node not in known:
        known[node] = None  # a loop cannot be followed
        known[node] = _find_moments(node, known)
    return known[node]


def _find_moments(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    module = node.module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        source = BatchNormMean(module, None)
        return source.mean(), source.var()
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return _after_layer(node, known)
    before = [_moments(other, known) for other in _inputs(node)]
    found = [moments for moments in before if moments is not None]
    if not found or len(found) < len(before):
        return None
    operation = _operation(node)
    for row in _ACTIVATIONS:
        if operation.startswith(row.gradient):
            return _activate(found[0], row.function)
    if isinstance(module, torch_pruning.ops._ConcatOp):
        means, variances = zip(*found, strict=True)
        return torch.cat(means), torch.cat(variances)
    if operation.startswith("AddBackward") and len({len(mean) for mean, _ in found}) == 1:
        means, variances = zip(*found, strict=True)
        return torch.stack(means).sum(dim=0), torch.stack(variances).sum(dim=0)
    is_kept = isinstance(module, torch_pruning.ops._ReshapeOp) or any(
        name in operation for name in _POOLS
    )
    return found[0] if is_kept and len(found) == 1 else None


def _after_layer(node: Any, known: dict[Any, Moments | None]) -> Moments | None:
    """Pass moments through a conv or linear, as if its inputs were independent."""
    moments = _input_moments(node, known)
    if moments is None:
        return None
    mean, var = moments
    layer = node.module
    if getattr(layer, "transposed", False):
        return None
    weight, groups = _kernels(layer, len(mean))
    after = ecdm(weight, mean, groups).sum(dim=0)
    if layer.bias is not None:
        after = after + layer.bias
    spread = ecdm(weight.square(), var, groups).sum(dim=0)
    return after, spread


def _activate(moments: Moments, act: Any) -> Moments:
    mean, var = moments
    std = var.sqrt()
    first = expected_activation(mean, std, act)
    second = expected_square_activation(mean, std, act)
    return first, (second - first.square()).clamp(min=0)


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
