"""Any CNN in, selective layers swapped in place; and a table of what a model holds."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from selectconv.checks import check_choice, check_count
from selectconv.errors import ConversionError, MeanSourceError, SelectConvWarning
from selectconv.graph import Graph, trace
from selectconv.kernels import describe_path
from selectconv.layer import SelectConv1d, SelectConv2d, SelectConv3d, SelectConvNd
from selectconv.mean_source import MeanSource, ObservedMean

_log = logging.getLogger(__name__)

REALLOCS = ("all", "pointwise", "none")
_MIN_CHANNELS = 8
_CPU = torch.device("cpu")
_SELECTIVE: dict[type[nn.Module], type[SelectConvNd]] = {
    nn.Conv1d: SelectConv1d,
    nn.Conv2d: SelectConv2d,
    nn.Conv3d: SelectConv3d,
}


def convert(
    model: nn.Module,
    example_input: Any = None,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    min_channels: int = _MIN_CHANNELS,
    realloc: str = "all",
) -> nn.Module:
    """Swap a model's eligible convs for selective ones, in place; its outputs stay as they are.

    Eligible is what is exactly a torch Conv1d, Conv2d or Conv3d with a weight of its own, has at
    least `min_channels` inputs, is reached by the forward, is not depthwise, is not seen to work on
    1x1 maps only, and is not fed with raw input. E[X] comes from the closed form where the model's
    graph shows batch norm -> activation -> conv, also through concatenation, dropout, average
    pooling and zero-padded channels; everywhere else it is observed in training.
    `sc.describe(model)` lists the outcome.

    Args:
        model: any model. Hooks, training flag, device and dtype are kept.
        example_input: a tensor, or a tuple of arguments, or a dict of keyword arguments, to see the
            sizes of maps and which convs work on raw input; it runs in evaluation mode. Optional.
        where: `where(name, conv)` chooses among the eligible convs.
        min_channels: convs with fewer inputs stay plain.
        realloc: "all" convs re-allocate, only 1x1 convs do ("pointwise"), or none ("none").

    Returns:
        The same model object.

    Raises:
        ConversionError: nothing to convert, or the model fails on `example_input`; the model was
            left as it was.
        TypeError, ValueError: an argument that is not accepted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
        ... )
        >>> type(convert(model, torch.randn(1, 3, 8, 8))[3]).__name__
        'SelectConv2d'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    check_count("min_channels", min_channels, 1)
    check_choice("realloc", realloc, REALLOCS)
    with torch.random.fork_rng(_cuda_devices(model)):  # a forward may draw
        seen = {} if example_input is None else _watch(model, example_input)
        graph = trace(model)
    if graph.failure is not None:
        _log.info("the model cannot be traced, so means are observed: %s", graph.failure)
    owners = _weight_owners(model)
    chosen: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    for name, conv in model.named_modules():
        if not isinstance(conv, _ConvNd) or isinstance(conv, SelectConvNd):
            continue
        reason = _why_not(conv, min_channels)
        if conv is model:
            reason = "is the model itself: use its SelectConv class's from_conv"
        reason = reason or _why_not_here(conv, graph, seen.get(id(conv)), owners)
        if reason is None and where is not None and not where(name, conv):
            reason = "left out by `where`"
        if reason is None:
            chosen[name] = conv
        else:
            refused[name] = reason
    if not chosen:
        if any(isinstance(module, SelectConvNd) for module in model.modules()):
            message = "the model is converted already; nothing was changed."
            warnings.warn(message, SelectConvWarning, stacklevel=2)
            return model
        raise ConversionError(_nothing_chosen(refused))
    layers = {
        id(conv): _SELECTIVE[type(conv)].from_conv(
            conv, reallocate=_may_reallocate(conv, realloc), mean=_mean_source(conv, graph)
        )
        for conv in chosen.values()
    }
    for name, reason in refused.items():
        model.get_submodule(name)._selectconv_skipped = reason  # type: ignore[assignment]
    for parent in list(model.modules()):
        for child, conv in list(parent._modules.items()):
            if id(conv) in layers:  # a shared conv becomes one shared layer
                parent._modules[child] = layers[id(conv)]
    return model


@dataclass(frozen=True)
class ConvRow:
    """One conv of a model, as `describe` shows it.

    Attributes:
        name: its dotted name.
        shape: its weight's shape (O, I / groups, ...).
        source: where E[X] comes from; None: the conv is not selective.
        skipped: why the conv is not selective; None: it is.
        open: open slots, re-allocated ones included.
        closed: closed slots.
        moved: open slots that were re-allocated.
        smallest_gamma: the smallest gamma that would close a slot now; None: unknown, or none.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    skipped: str | None
    open: int
    closed: int
    moved: int
    smallest_gamma: float | None


class Description(tuple[ConvRow, ...]):
    """The rows of `describe`, which print as a table.

    Attributes:
        path: how the selective layers compute in eager mode where the model is: a kernel, or why
            there is none.
    """

    path: str

    def __str__(self) -> str:
        table = [
            (
                "conv",
                "weight",
                "E[X] or why it is plain",
                "open",
                "closed",
                "moved",
                "acts from gamma",
            )
        ]
        for row in self:
            gamma = "-" if row.smallest_gamma is None else f"{row.smallest_gamma:.2g}"
            counts = (
                ("-", "-", "-") if row.skipped else (str(row.open), str(row.closed), str(row.moved))
            )
            why = f"plain: {row.skipped}" if row.skipped else str(row.source)
            table.append(
                (row.name or "(model)", "x".join(map(str, row.shape)), why, *counts, gamma)
            )
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        selective = [row for row in self if not row.skipped]
        closed, moved = sum(row.closed for row in selective), sum(row.moved for row in selective)
        slots = sum(row.open + row.closed for row in selective)
        lines.append(
            f"{len(selective)} of {len(self)} convs selective; "
            f"of {slots} slots {closed} closed, {moved} re-allocated"
        )
        if selective:
            lines[-1] += f"; eager mode runs on {self.path}"
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """List every conv of a model: its source of E[X] or why it is plain, and its allocation.

    Example:
        >>> import selectconv as sc
        >>> rows = describe(sc.create_model("densenet40", selective=True))
        >>> len(rows), rows[0].skipped, rows[1].source
        (37, '3 inputs, fewer than min_channels=8', 'batch norm + relu')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    rows = []
    for name, conv in model.named_modules():
        if not isinstance(conv, _ConvNd):
            continue
        shape = tuple(conv.weight.shape)
        if not isinstance(conv, SelectConvNd):
            why = (
                getattr(conv, "_selectconv_skipped", None)
                or _why_not(conv, _MIN_CHANNELS)
                or "not converted"
            )
            rows.append(ConvRow(name, shape, None, str(why), conv.in_channels, 0, 0, None))
            continue
        try:
            gamma = conv.smallest_gamma()
        except MeanSourceError:
            gamma = None
        is_open = int(conv.gate.sum())
        rows.append(
            ConvRow(
                name=name,
                shape=shape,
                source="none: set `mean_source`"
                if conv.mean_source is None
                else repr(conv.mean_source),
                skipped=None,
                open=is_open,
                closed=conv.in_channels - is_open,
                moved=int((conv.moved & conv.gate).sum()),
                smallest_gamma=gamma,
            )
        )
    description = Description(rows)
    description.path = describe_path(next((p.device for p in model.parameters()), _CPU))
    return description


@dataclass(frozen=True)
class _Seen:
    """What running the example input showed of a conv's inputs."""

    only_points: bool = True
    is_raw: bool = False


def _watch(model: nn.Module, example_input: Any) -> dict[int, _Seen]:
    """Run the example input and watch what reaches each conv."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(example_input, Mapping):
        kwargs = example_input
    else:
        args = tuple(example_input) if isinstance(example_input, tuple | list) else (example_input,)
    raw = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    seen: dict[int, _Seen] = {}

    def watch(conv: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = inputs[0] if inputs else keywords["input"]
        before = seen.get(id(conv), _Seen())
        is_point = all(size == 1 for size in x.shape[2:])
        seen[id(conv)] = _Seen(before.only_points and is_point, before.is_raw or id(x) in raw)

    convs = [module for module in model.modules() if isinstance(module, _ConvNd)]
    handles = [conv.register_forward_pre_hook(watch, with_kwargs=True) for conv in convs]
    try:
        with torch.no_grad(), _evaluating(model):
            model(*args, **kwargs)
    except Exception as error:
        raise ConversionError(f"`example_input`: the model fails on it with {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags:
        module.training = False  # not .eval(): models override it
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {parameter.device for parameter in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda")


def _weight_owners(model: nn.Module) -> dict[int, int]:
    """Count the modules that hold each parameter."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def _why_not(conv: _ConvNd, min_channels: int) -> str | None:
    """Say why a conv cannot be selective wherever it stands."""
    if type(conv) not in _SELECTIVE:
        if conv.transposed:
            return "transposed"
        if hasattr(conv, "parametrizations"):
            return "parametrised weight"
        return f"a subclass ({type(conv).__name__}) may compute something else"
    if "weight" not in conv._parameters:
        return "its weight is recomputed by a hook"
    if "forward" in vars(conv):
        return "its forward is patched"
    if conv.groups > 1 and conv.groups == conv.in_channels:
        return "depthwise"
    if conv.in_channels < min_channels:
        return f"{conv.in_channels} inputs, fewer than min_channels={min_channels}"
    return None


def _why_not_here(
    conv: _ConvNd, graph: Graph, seen: _Seen | None, owners: dict[int, int]
) -> str | None:
    """Say why a conv cannot be selective in this model."""
    if owners[id(conv.weight)] > 1:
        return "shares its weight with another module"
    shown = graph.inputs.get(id(conv))
    if (shown is not None and shown.is_raw) or (seen is not None and seen.is_raw):
        return "fed with raw input"
    if seen is not None and seen.only_points:
        return "works on 1x1 maps only: nothing to shift"
    if graph.failure is None and shown is None and seen is None:
        return "not reached by the model's forward"
    return None


def _may_reallocate(conv: nn.Module, realloc: str) -> bool:
    assert isinstance(conv, _ConvNd)
    is_pointwise = all(size == 1 for size in conv.kernel_size)
    return realloc == "all" or (realloc == "pointwise" and is_pointwise)


def _mean_source(conv: nn.Module, graph: Graph) -> MeanSource:
    shown = graph.inputs.get(id(conv))
    return ObservedMean() if shown is None or shown.source is None else shown.source


def _nothing_chosen(refused: dict[str, str]) -> str:
    if not refused:
        return "`model` has no convolutions to convert."
    reasons = "; ".join(f"{name or '(model)'}: {why}" for name, why in list(refused.items())[:5])
    more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
    if any(why == "left out by `where`" for why in refused.values()):
        return f"`where` left out every eligible conv of the {len(refused)}: {reasons}{more}."
    return f"none of the {len(refused)} convs is eligible: {reasons}{more}."
