"""Whether ECDM can be trusted on a network: the measured and the expected damage of each slot.

Closing slot i takes `c = sum_k W[:, i, k] * x_k` from the output at every position, where `x_k` is
what the selected input shows kernel position k there, the padding included. So the first and second
moments of the `x_k`, one pass over the data, give mean and rms of the damage of every slot and
output exactly; no slot needs to be closed, and no output to be kept.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from selectconv.core.ecdm import normalize_ecdm
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers, unwrap
from selectconv.core.slots import split_groups
from selectconv.errors import AllocationError, BadType, naming
from selectconv.graph.example import evaluating
from selectconv.tables import text_table

_CHUNK = 1 << 22  # numbers of the input that are unfolded at a time


@dataclass(frozen=True, eq=False)
class LayerDamage:
    """Expected and measured damage of closing each slot of one layer. All tensors are on the CPU.

    Attributes:
        source: where the layer's E[X] comes from.
        damage: what `damage="auto"` means for this layer: "mean" or "rms".
        is_open: (I,) bool. Rows of closed slots are zero in both matrices.
        expected: (I, O), what each slot is expected to add to each output: its mean, which is ECDM
            (Eq. (2)), or its root mean square (`functional.rms_damage`).
        measured: (I, O), the same as measured, over all batches and output positions.
    """

    source: str
    damage: str
    is_open: Tensor
    expected: Tensor
    measured: Tensor

    def rank_correlation(self) -> float:
        """Return Spearman's correlation of each open slot's expected and measured share.

        The share is `max_j nECDM[i, j]`, which Algorithm 1 sorts by and compares with gamma. NaN
        where one side does not vary.
        """
        ranks = []
        for matrix in (self.expected, self.measured):
            share = normalize_ecdm(matrix).amax(dim=1)[self.is_open]
            is_above = (share[:, None] > share).double() - (share[:, None] < share).double()
            ranks.append(is_above.sum(dim=1))  # of mean 0, and the same for equal shares
        a, b = ranks
        return float(a @ b / (a.norm() * b.norm()))


class DamageReport(dict[str, LayerDamage]):
    """One `LayerDamage` per layer that a batch passed through, by name; prints as a table."""

    def __str__(self) -> str:
        lines = [
            (name, row.source, f"{row.is_open.sum()}", row.damage, f"{row.rank_correlation():.2f}")
            for name, row in self.items()
        ]
        return text_table([("layer", "E[X]", "open", "by", "rank r"), *lines], right=(2, 4))

    __repr__ = __str__  # for notebooks


def observe_damage(model: nn.Module, batches: Iterable[Any]) -> DamageReport:
    """Measure what closing each slot would do to its layer's output, and compare it with ECDM.

    The model runs in evaluation mode without gradients. Its training flags are restored, and
    nothing else changes. In a process group, each rank measures its own batches.

    Args:
        model: a model with selective layers that know E[X]. Layers that observe it need a few
            training steps first.
        batches: any iterable of batches, such as a DataLoader. If a batch is a tuple or list, its
            first item is the model's input; a dict holds the model's keyword arguments.

    Returns:
        A dict with one `LayerDamage` per layer that a batch passed through. `print` it for a table
        of rank correlations.

    Raises:
        AllocationError: the model has no selective layers, or there are no batches.
        MeanSourceError: a layer does not know the mean of its input.
        TypeError: `model` or `batches` has the wrong type.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import selectconv as sc
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
        ... )
        >>> images = torch.randn(4, 3, 8, 8)
        >>> report = observe_damage(sc.convert(model, images), [images])
        >>> report["3"].measured.shape
        torch.Size([16, 8])
    """
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise BadType(
            "`batches` must be an iterable of batches, such as a DataLoader or [images], got "
            f"{type(batches).__name__}."
        )
    model = unwrap(model)
    layers = selective_layers(model)
    seen = {name: _WindowMoments(layer) for name, layer in layers.items()}
    hooks = [
        layer.register_forward_pre_hook(seen[name].add, with_kwargs=True)
        for name, layer in layers.items()
    ]
    device = next(model.parameters()).device
    try:
        with evaluating(model), torch.no_grad():
            for batch in batches:
                batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
                if isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(batch[0] if isinstance(batch, list | tuple) else batch)
    finally:
        for hook in hooks:
            hook.remove()
    report = DamageReport()
    for name, moments in seen.items():
        if moments.count:
            with naming(name):
                report[name] = moments.compare()
    if not report:
        raise AllocationError(
            "no batch passed through a selective layer: `batches` contains none (an iterator that "
            "was used up?), or `model` has no selective layers (call sc.convert first)."
        )
    return report


class _WindowMoments:
    """First and second moments of what a layer's kernel positions see, slot by slot."""

    def __init__(self, layer: SelectConvNd) -> None:
        positions = math.prod(layer.kernel_size)
        # MPS has no float64. Elsewhere it keeps kernels that cancel a large mean exact.
        exact = torch.float32 if layer.weight.device.type == "mps" else torch.float64
        self.layer, self.count = layer, 0
        self.first = layer.weight.new_zeros(layer.in_channels, positions, dtype=exact)
        self.second = self.first.new_zeros(layer.in_channels, positions, positions)

    def add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in an input of the layer, as a forward hook."""
        layer, x = self.layer, args[0] if args else kwargs["input"]
        x = layer.select(x if x.ndim == layer.weight.ndim else x[None])
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        slots, positions = self.first.shape
        step = max(1, _CHUNK // max(1, x[:, :1].numel() * positions))
        for axis, size in enumerate(layer.kernel_size):
            x = x.unfold(2 + axis, layer.dilation[axis] * (size - 1) + 1, layer.stride[axis])
            x = x[..., :: layer.dilation[axis]]
        x = x.transpose(0, 1)  # (I, N, output axes, kernel axes)
        for start in range(0, slots, step):
            part = x[start : start + step].to(self.first.dtype)
            windows = part.reshape(len(part), -1, positions)
            self.first[start : start + step] += windows.sum(dim=1)
            self.second[start : start + step] += windows.mT @ windows
        self.count += windows.shape[1]

    def compare(self) -> LayerDamage:
        """Compute what each slot adds to each output, beside what is expected."""
        layer, groups, source = self.layer, self.layer.groups, self.layer.mean_source
        expected = layer.ecdm(damage="auto").float().cpu()
        weight = split_groups(layer.weight.detach().to(self.first.dtype), groups).flatten(3)
        if source is not None and source.is_nonnegative:
            damage, first = "mean", (self.first / self.count).unflatten(0, (groups, -1))
            by_group = torch.einsum("goik,gik->gio", weight, first)
        else:
            damage, second = "rms", (self.second / self.count).unflatten(0, (groups, -1))
            square = torch.einsum("goik,gikl,goil->gio", weight, second, weight)
            by_group = square.clamp(min=0.0).sqrt()
        measured = torch.block_diag(*by_group).float().cpu()
        return LayerDamage(repr(source), damage, layer.gate.cpu().clone(), expected, measured)
