"""Any CNN in, selective layers swapped in place; and a table of its convs."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

from selectconv.checks import check_callable, check_choice, check_count, warn
from selectconv.core.kernels import describe_path
from selectconv.core.layer import SelectConv1d, SelectConv2d, SelectConv3d, SelectConvNd
from selectconv.core.mean_source import ClosedForm, ObservedMean
from selectconv.core.models import PARALLEL, selective_layers, unwrap_compiled
from selectconv.core.slots import is_patched, torch_conv
from selectconv.errors import ConversionError, MeanSourceError
from selectconv.graph.example import as_arguments, evaluating
from selectconv.graph.input_mean import ConvInput, find_conv_inputs
from selectconv.tables import counted, text_table

_log = logging.getLogger(__name__)

_MIN_CHANNELS = 8
_SELECTIVE: dict[type[nn.Module] | None, type[SelectConvNd]] = {
    nn.Conv1d: SelectConv1d,
    nn.Conv2d: SelectConv2d,
    nn.Conv3d: SelectConv3d,
}


@torch.inference_mode(False)  # what is made there cannot be trained
def convert(
    model: nn.Module,
    example_input: Any = None,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    min_channels: int = _MIN_CHANNELS,
    realloc: str = "all",
) -> nn.Module:
    """Replace a model's eligible convs by selective ones, in place, without changing its outputs.

    A conv is eligible if it is a torch Conv1d, Conv2d or Conv3d, or of a subclass whose `forward`
    and `_conv_forward` are torch's, with a weight of its own, has at least `min_channels` inputs,
    is reached by the model's forward, is not depthwise, does not read the model's raw input, and is
    not seen to work on 1x1 maps only.

    E[X], the mean of a conv's input, has a closed form if the model's graph shows batch norm ->
    activation -> conv, also through concatenation, dropout, average pooling, upsampling, and
    zero-padded, split and shuffled channels. All other convs observe it during training.
    `sc.describe(model)` lists the outcome.

    Args:
        model: any model. Hooks, training flag, device and dtype are kept. A model that
            `torch.compile` wrapped is converted inside the wrapper. Convert a model before you
            wrap it for data parallelism.
        example_input: a tensor, a tuple of arguments, or a dict of keyword arguments. Optional. The
            model runs on it in evaluation mode, which shows the sizes of maps, and the convs that
            read raw input in a model that cannot be traced.
        where: `where(name, conv)` chooses among the eligible convs.
        min_channels: convs with fewer inputs stay plain.
        realloc: which convs re-allocate: "all", 1x1 convs only ("pointwise"), or "none".

    Returns:
        The same model object.

    Raises:
        ConversionError: there is nothing to convert, the model fails on `example_input`, or it is
            wrapped for data parallelism. The model stays as it was.
        TypeError, ValueError: an argument is not accepted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
        ... )
        >>> type(convert(model, torch.randn(1, 3, 8, 8))[3]).__name__
        'SelectConv2d'
    """
    root = unwrap_compiled(model)
    if isinstance(root, PARALLEL):
        raise ConversionError(
            f"`model` is wrapped in {type(root).__name__}, which would not see the new parameters: "
            "convert the model itself, then wrap it."
        )
    if dist.is_available() and dist.is_initialized() and _is_wrapped(root):
        raise ConversionError(
            "`model` is part of a DistributedDataParallel, which would not share the new "
            "parameters between processes: convert the model, then wrap it."
        )
    check_count("min_channels", min_channels, 1)
    check_choice("realloc", realloc, ("all", "pointwise", "none"))
    if where is not None:
        check_callable("where", where)
    args, kwargs = ((), {}) if example_input is None else as_arguments(example_input)
    cuda = {p.device.index for p in root.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(cuda):  # a forward may draw
        seen = {} if example_input is None else _watch(root, args, kwargs)
        shown, failure = find_conv_inputs(root, args, kwargs)
    if failure is not None:
        _log.info("the model cannot be traced, so input means are observed: %s", failure)
    owners = Counter(id(p) for module in root.modules() for p in module._parameters.values())
    layers: dict[int, SelectConvNd] = {}
    refused: dict[str, str] = {}
    for name, conv in root.named_modules():
        if not isinstance(conv, _ConvNd) or isinstance(conv, SelectConvNd):
            continue
        found, calls = shown.get(id(conv)), seen.get(id(conv), [])
        reasons = {
            "is the model itself: use its SelectConv class's from_conv": conv is root,
            **_reasons_anywhere(conv, min_channels),
            "shares its weight with another module": owners[id(conv._parameters.get("weight"))] > 1,
            "fed with raw input": any(is_raw for _, is_raw in calls)
            or (found is not None and found.is_raw),
            "works on 1x1 maps only: nothing to shift": bool(calls)
            and all(is_point for is_point, _ in calls),
            "not reached by the model's forward": not (found or calls or failure),
        }
        why = _first(reasons)
        if why is None and where is not None and not where(name, conv):
            why = "left out by `where`"
        if why is not None:
            refused[name] = why
            continue
        may = realloc == "all" or (realloc == "pointwise" and set(conv.kernel_size) == {1})
        layers[id(conv)] = _SELECTIVE[torch_conv(conv)].from_conv(
            conv, reallocate=may, mean=(found and found.source) or ObservedMean()
        )
    if not layers and selective_layers(root):
        warn("the model is already converted; nothing was changed.")
        return model
    if not layers:
        lines = [f"{name or '(model)'}: {why}" for name, why in refused.items()]
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        listed = "; ".join(lines[:5]) or "there are none"
        raise ConversionError(f"none of the {len(lines)} convs is eligible: {listed}{more}.")
    for name, why in refused.items():
        root.get_submodule(name)._selectconv_skipped = why  # type: ignore[assignment]
    for parent in list(root.modules()):
        for child, plain in parent._modules.items():  # a shared conv becomes one shared layer
            parent._modules[child] = layers.get(id(plain), plain)
    root._selectconv_example = tree_map(  # what tracing decides by
        lambda value: value if value is None or isinstance(value, bool | str) else ...,
        (args, kwargs),
    )
    return model


def _is_wrapped(model: nn.Module) -> bool:
    """Return whether a living DistributedDataParallel holds a model; it leaves no trace in it."""
    return any(
        module is model
        for held in gc.get_objects()
        if issubclass(type(held), nn.parallel.DistributedDataParallel)
        for module in held.modules()
    )


def find_stale_sources(model: nn.Module) -> dict[str, str]:
    """Trace again what `convert` traced, and find the layers whose closed form no longer holds.

    An activation was replaced or a pool added since, or a batch norm stays in evaluation mode while
    its conv trains. Sources that were set by hand are trusted.

    Returns:
        By the layer's name, what the graph shows now. Empty where it cannot be traced any more.
    """
    stale = {}
    for place, root in model.named_modules():
        if "_selectconv_example" not in vars(root):
            continue
        with torch.random.fork_rng([]):
            shown, _ = find_conv_inputs(root, *vars(root)["_selectconv_example"])
        for name, layer in selective_layers(root).items() if shown else ():
            source, now = layer.mean_source, shown.get(id(layer), ConvInput()).source
            if isinstance(source, ClosedForm) and source.is_found and not _is_same(source, now):
                stale[f"{place}.{name}".lstrip(".")] = "observed" if now is None else repr(now)
    return stale


def _is_same(source: ClosedForm, other: ClosedForm | None) -> bool:
    """Return whether two sources read the same batch norms and compute the same."""
    return (
        other is not None
        and [id(bn.weight) for bn in source.batch_norms()]
        == [id(bn.weight) for bn in other.batch_norms()]
        and torch.allclose(source.moment(1), other.moment(1), equal_nan=True)
        and torch.allclose(source.moment(2), other.moment(2), equal_nan=True)
    )


def _reasons_anywhere(conv: _ConvNd, min_channels: int) -> dict[str, bool]:
    """Return the reasons for which a conv stays plain in any model, and whether each holds."""
    weight, kind = conv._parameters.get("weight"), type(conv)
    few = f"{counted(conv.in_channels, 'input')}, fewer than min_channels={min_channels}"
    is_lazy = isinstance(weight, UninitializedParameter)
    return {
        "not initialised: give `example_input`, or run the model once": is_lazy,
        "transposed": conv.transposed,
        "parametrised weight": hasattr(conv, "parametrizations"),
        f"a subclass ({kind.__name__}) may compute something else": torch_conv(conv) is None,
        "its weight is recomputed by a hook": weight is None,
        "its forward is patched": is_patched(conv),
        "depthwise": 1 < conv.groups == conv.in_channels,
        few: conv.in_channels < min_channels,
    }


def _first(reasons: dict[str, bool]) -> str | None:
    return next((why for why, holds in reasons.items() if holds), None)


def _watch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, list[tuple[bool, bool]]]:
    """Run the example, and note of each input of a conv, by its id: is it 1x1, and is it raw?"""
    raw = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    seen: dict[int, list[tuple[bool, bool]]] = {}

    def watch(conv: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = inputs[0] if inputs else keywords["input"]
        is_point = all(size == 1 for size in x.shape[-len(conv.kernel_size) :])
        seen.setdefault(id(conv), []).append((is_point, id(x) in raw))

    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, _ConvNd)
    ]
    try:
        with torch.no_grad(), evaluating(model):
            model(*args, **kwargs)
    except Exception as error:
        raise ConversionError(f"`example_input`: the model fails on it with {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return seen


@dataclass(frozen=True)
class ConvRow:
    """One conv of a model, as `describe` shows it.

    Attributes:
        name: its dotted name.
        shape: its weight's shape (O, I / groups, ...).
        source: where E[X] comes from. None: the conv is not selective.
        skipped: why the conv is not selective. None: it is selective.
        open: the number of open slots, including re-allocated ones.
        closed: the number of closed slots.
        moved: the number of open slots that were re-allocated.
        smallest_gamma: the smallest gamma that would close a slot now. None: not known, or no
            gamma would.
        held: why none of its filters can be closed, as an allocator with granularity "filter"
            found. None: some can, or nobody has looked.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    skipped: str | None
    open: int
    closed: int
    moved: int
    smallest_gamma: float | None
    held: str | None = None


class Description(tuple[ConvRow, ...]):
    """The rows of `describe`, which print as a table.

    Attributes:
        path: which kernel the selective layers use in eager mode on the model's device, or why
            they use none.
    """

    path: str

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [
            ("conv", "weight", "E[X] or why it is plain", "open", "closed", "moved",
             "acts from gamma")
        ]  # fmt: skip
        for row in self:
            gamma = "-" if row.smallest_gamma is None else f"{row.smallest_gamma:.2g}"
            why = f"plain: {row.skipped}" if row.skipped else str(row.source)
            why += f"; its filters stay: {row.held}" if row.held else ""
            slots = ("-", "-", "-") if row.skipped else (row.open, row.closed, row.moved)
            shape = "x".join(map(str, row.shape))
            table.append((row.name or "(model)", shape, why, *map(str, slots), gamma))
        selective = [row for row in self if not row.skipped]
        closed, moved = sum(row.closed for row in selective), sum(row.moved for row in selective)
        total = sum(row.open + row.closed for row in selective)
        path = f"; eager mode runs on {self.path}" if selective else ""
        return (
            f"{text_table(table, right=range(3, 7))}\n"
            f"{len(selective)} of {len(self)} convs selective; "
            f"of {total} slots {closed} closed, {moved} re-allocated{path}"
        )

    __repr__ = __str__  # for notebooks


def describe(model: nn.Module) -> Description:
    """List every conv of a model: its slots and where E[X] comes from, or why it is plain.

    Args:
        model: a plain or selective model.

    Example:
        >>> import selectconv as sc
        >>> rows = describe(sc.create_model("densenet40", selective=True))
        >>> len(rows), rows[0].skipped, rows[1].source
        (37, '3 inputs, fewer than min_channels=8', 'batch norm + relu')
    """
    rows, root = [], unwrap_compiled(model)
    stale = find_stale_sources(root)
    for name, conv in root.named_modules():
        if not isinstance(conv, _ConvNd):
            continue
        is_lazy = isinstance(conv.weight, UninitializedParameter)
        held = getattr(conv, "_selectconv_held", None)
        shape = () if is_lazy else tuple(conv.weight.shape)
        if not isinstance(conv, SelectConvNd):
            known = getattr(conv, "_selectconv_skipped", None)
            why = str(known or _first(_reasons_anywhere(conv, _MIN_CHANNELS)) or "not converted")
            rows.append(ConvRow(name, shape, None, why, conv.in_channels, 0, 0, None, held))
            continue
        try:
            gamma = conv.smallest_gamma()
        except MeanSourceError:
            gamma = None
        source = "none: set `mean_source`" if conv.mean_source is None else repr(conv.mean_source)
        if name in stale:
            source += f", which no longer holds (now: {stale[name]})"
        if conv.is_frozen:
            source += "; frozen: no step touches it"
        num_open, moved = int(conv.gate.sum()), int((conv.moved & conv.gate).sum())
        closed = conv.in_channels - num_open
        rows.append(ConvRow(name, shape, source, None, num_open, closed, moved, gamma, held))
    description = Description(rows)
    description.path = describe_path(
        next((p.device for p in model.parameters()), torch.device("cpu"))
    )
    return description
