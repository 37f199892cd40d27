"""Whether ECDM can be trusted on a network: the measured and the expected damage of each slot.

Closing slot i takes `c = sum_k W[:, i, k] * x_k` from the output at every position, where `x_k` is
what the selected input shows kernel position k there, the padding included. So the first and second
moments of the `x_k`, one pass over the data, give mean and rms of the damage of every slot and
output exactly; no slot needs to be closed, and no output to be kept.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.checks import check_callable
from selectconv.core.ecdm import normalize_ecdm
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers, unwrap
from selectconv.core.slots import split_groups
from selectconv.errors import AllocationError, naming
from selectconv.tables import counted, html_table, text_table

_CHUNK = 1 << 22  # numbers of the input that are unfolded at a time
_WORST = 3  # offenders that a table's row has room for
_FIGURES = (2, 4, 5, 6, 7)  # columns of figures


@dataclass(frozen=True)
class Offender:
    """A slot that does more damage than expected.

    Attributes:
        slot: its number.
        expected: its largest share of an output, as expected.
        measured: its largest share of an output, as measured.
    """

    slot: int
    expected: float
    measured: float


@dataclass(frozen=True, eq=False)
class LayerDamage:
    """Expected and measured damage of closing each slot of one layer. All tensors are on the CPU.

    Attributes:
        name: the layer's dotted name.
        source: where its E[X] comes from.
        decides_by: what `damage="auto"` means for this layer: "mean" or "rms".
        is_open: (I,) bool. Rows of closed slots are zero in all matrices.
        expected: (I, O), ECDM: the expected mean of what each slot adds to each output, Eq. (2).
        measured: (I, O), the measured mean, over all batches and output positions.
        expected_rms: (I, O), the expected root mean square (`functional.rms_damage`).
        measured_rms: (I, O), the measured root mean square.
    """

    name: str
    source: str
    decides_by: str
    is_open: Tensor
    expected: Tensor
    measured: Tensor
    expected_rms: Tensor
    measured_rms: Tensor

    def shares(self, damage: str | None = None) -> tuple[Tensor, Tensor]:
        """Return each open slot's largest share of an output, expected and measured.

        The share is `max_j nECDM[i, j]`, which Algorithm 1 sorts by and compares with gamma.

        Args:
            damage: "mean" or "rms". None: what the layer decides by.
        """
        pair = (self.expected, self.measured)
        if (damage or self.decides_by) == "rms":
            pair = (self.expected_rms, self.measured_rms)
        expected, measured = (normalize_ecdm(matrix).amax(dim=1)[self.is_open] for matrix in pair)
        return expected, measured

    def correlation(self, damage: str | None = None) -> float | None:
        """Return Pearson's correlation of the `shares`; None where one side does not vary."""
        return _pearson(*self.shares(damage))

    def rank_correlation(self, damage: str | None = None) -> float | None:
        """Return Spearman's correlation of the `shares`; None where one side does not vary."""
        expected, measured = self.shares(damage)
        return _pearson(_ranks(expected), _ranks(measured))

    def worst(self, count: int = 5, damage: str | None = None) -> list[Offender]:
        """Return the slots whose measured share exceeds the expected one most, the worst first."""
        expected, measured = self.shares(damage)
        slots = self.is_open.nonzero().flatten()
        order = (measured - expected).sort(descending=True, stable=True).indices
        return [
            Offender(int(slots[i]), float(expected[i]), float(measured[i]))
            for i in order[:count].tolist()
            if measured[i] > expected[i]
        ]


class DamageReport(dict[str, LayerDamage]):
    """One `LayerDamage` per layer, by name; prints as a table.

    Attributes:
        unreached: selective layers that no batch passed through.
    """

    def __init__(self, layers: Iterable[LayerDamage], unreached: Iterable[str] = ()) -> None:
        super().__init__((layer.name, layer) for layer in layers)
        self.unreached = tuple(unreached)

    def __str__(self) -> str:
        return "\n".join([text_table(self._lines(), right=_FIGURES), *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(self._lines(), right=_FIGURES, note="; ".join(self._notes()))

    def _lines(self) -> list[tuple[str, ...]]:
        heads = ("layer", "E[X]", "open", "by", "r", "rank r", "r (rms)", "rank r (rms)")
        table: list[tuple[str, ...]] = [(*heads, "worst slots: expected -> measured share")]
        for row in self.values():
            worst = ", ".join(
                f"{bad.slot}: {bad.expected:.2g} -> {bad.measured:.2g}" for bad in row.worst(_WORST)
            )
            figures = [
                _show(figure)
                for damage in ("mean", "rms")
                for figure in (row.correlation(damage), row.rank_correlation(damage))
            ]
            is_open = str(int(row.is_open.sum()))
            table.append((row.name, row.source, is_open, row.decides_by, *figures, worst or "-"))
        return table

    def _notes(self) -> list[str]:
        ranked = [(row.rank_correlation(), row.name) for row in self.values()]
        known = sorted((rank, name) for rank, name in ranked if rank is not None)
        notes = []
        if known:
            middle = known[len(known) // 2][0]
            notes.append(
                f"{counted(len(self), 'layer')}; rank correlation of expected and measured "
                f"shares: median {middle:.2f}, lowest {known[0][0]:.2f} at {known[0][1]}"
            )
        if self.unreached:
            notes.append(f"no batch passed through: {', '.join(self.unreached)}")
        return notes


def observe_damage(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> DamageReport:
    """Measure what closing each slot would do to its layer's output, and compare it with ECDM.

    The model runs in evaluation mode without gradients. Its training flags are restored, and
    nothing else changes. In a process group, each rank measures its own batches.

    Args:
        model: a model with selective layers that know E[X]. Layers that observe it need a few
            training steps first.
        batches: any iterable of batches, such as a DataLoader. If a batch is a tuple or list, its
            first item is the model's input; if it is a dict, the entries that are arguments of the
            model's forward are passed.
        forward: for other batches, `forward(model, batch)` runs the model.

    Returns:
        A dict with one `LayerDamage` per layer. `print` it for a table of correlations and the
        worst slots.

    Raises:
        AllocationError: the model has no selective layers, there are no batches, or the model
            fails on one.
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
        raise TypeError(
            "`batches` must be an iterable of batches, such as a DataLoader or [images], got "
            f"{type(batches).__name__}."
        )
    if forward is not None:
        check_callable("forward", forward)
    model = unwrap(model)
    layers = selective_layers(model)
    if not layers:
        raise AllocationError("`model` has no selective layers: call sc.convert(model) first.")
    expected = {name: _expect(name, layer) for name, layer in layers.items()}
    seen = {name: _WindowMoments(layer) for name, layer in layers.items()}
    _run(model, batches, forward or _forward, seen)
    reached = [name for name in layers if seen[name].count]
    return DamageReport(
        (_compare(name, layers[name], expected[name], seen[name]) for name in reached),
        unreached=(name for name in layers if name not in reached),
    )


class _WindowMoments:
    """First and second moments of what a layer's kernel positions see, slot by slot."""

    def __init__(self, layer: SelectConvNd) -> None:
        positions = math.prod(layer.kernel_size)
        # MPS has no float64. Elsewhere it keeps kernels that cancel a large mean exact.
        exact = torch.float32 if layer.weight.device.type == "mps" else torch.float64
        zeros = partial(torch.zeros, dtype=exact, device=layer.weight.device)
        self.layer = layer
        self.first = zeros(layer.in_channels, positions)
        self.second = zeros(layer.in_channels, positions, positions)
        self.count = 0

    def add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in an input of the layer, as a forward hook."""
        layer, x = self.layer, args[0] if args else kwargs["input"]
        x = layer.select(x if x.ndim == layer.weight.ndim else x[None])
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        per_slot = max(1, x[:, :1].numel() * self.first.shape[1])
        step = max(1, _CHUNK // per_slot)
        for start in range(0, layer.in_channels, step):
            windows = self._unfold(x[:, start : start + step].to(self.first.dtype))
            self.first[start : start + step] += windows.sum(dim=1)
            self.second[start : start + step] += windows.mT @ windows
        self.count += windows.shape[1]

    def damage(self) -> tuple[Tensor, Tensor]:
        """Compute mean and rms of what each slot adds to each output, (I, O) each."""
        groups = self.layer.groups
        weight = split_groups(self.layer.weight.detach().to(self.first.dtype), groups).flatten(3)
        by_group = (groups, self.layer.in_channels // groups)
        first = (self.first / self.count).view(*by_group, -1)
        second = (self.second / self.count).view(*by_group, *self.second.shape[1:])
        mean = torch.einsum("goik,gik->gio", weight, first)
        square = torch.einsum("goik,gikl,goil->gio", weight, second, weight)
        rms = square.clamp(min=0.0).sqrt()
        return torch.block_diag(*mean).float().cpu(), torch.block_diag(*rms).float().cpu()

    def _unfold(self, x: Tensor) -> Tensor:
        """Lay out a padded input (N, C, ...) as (C, output positions, kernel positions)."""
        layer, axes = self.layer, len(self.layer.kernel_size)
        for axis in range(axes):
            reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
            x = x.unfold(2 + axis, reach, layer.stride[axis])
            x = x[..., :: layer.dilation[axis]]
        # (N, C, output axes, kernel axes)
        return x.transpose(0, 1).reshape(x.shape[1], -1, math.prod(layer.kernel_size))


def _expect(name: str, layer: SelectConvNd) -> tuple[Tensor, Tensor]:
    with naming(name):
        mean, rms = layer.ecdm(damage="mean"), layer.ecdm(damage="rms")
    return mean.float().cpu(), rms.float().cpu()


def _compare(
    name: str, layer: SelectConvNd, expected: tuple[Tensor, Tensor], seen: _WindowMoments
) -> LayerDamage:
    measured = seen.damage()
    source = layer.mean_source
    return LayerDamage(
        name=name,
        source=repr(source),
        decides_by="mean" if source is not None and source.is_nonnegative else "rms",
        is_open=layer.gate.cpu().clone(),
        expected=expected[0],
        measured=measured[0],
        expected_rms=expected[1],
        measured_rms=measured[1],
    )


def _run(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], object],
    seen: Mapping[str, _WindowMoments],
) -> None:
    modes = {module: module.training for module in model.modules()}
    hooks = [
        moments.layer.register_forward_pre_hook(moments.add, with_kwargs=True)
        for moments in seen.values()
    ]
    number = -1
    try:
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches):
                try:
                    forward(model, batch)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise AllocationError(f"the model fails on batch {number}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if number < 0:
        raise AllocationError("`batches` contains no batch (an iterator that was used up?).")


def _forward(model: nn.Module, batch: Any) -> object:
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        wanted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
        inputs = {key: _to(batch[key], device) for key in batch if takes_all or key in wanted}
        if not inputs:
            raise TypeError(
                f"none of the batch's entries {sorted(map(str, batch))} is an argument of the "
                f"model's forward ({', '.join(wanted)}): pass `forward`."
            )
        return model(**inputs)
    if isinstance(batch, list | tuple):
        if not batch:
            raise TypeError("the batch is empty.")
        batch = batch[0]
    return model(_to(batch, device))


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _pearson(a: Tensor, b: Tensor) -> float | None:
    if len(a) < 2:
        return None
    a, b = (values.double() - values.double().mean() for values in (a, b))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else None


def _ranks(values: Tensor) -> Tensor:
    """Rank from the smallest; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return ranks[inverse]


def _show(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"
