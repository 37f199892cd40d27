"""Any CNN in, selective layers swapped in place."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from selectconv.checks import check_callable, check_choice, check_count, warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import MeanSource, ObservedMean
from selectconv.core.models import PARALLEL, selective_layers, unwrap_compiled
from selectconv.errors import ConversionError
from selectconv.graph.eligibility import (
    MIN_CHANNELS,
    SELECTIVE,
    Seen,
    weight_owners,
    why_not,
    why_not_here,
)
from selectconv.graph.example import as_arguments, evaluating, settled_arguments
from selectconv.graph.input_mean import Calls, ConvInputs, find_conv_inputs

_log = logging.getLogger(__name__)

REALLOCS = ("all", "pointwise", "none")


def convert(
    model: nn.Module,
    example_input: Any = None,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    min_channels: int = MIN_CHANNELS,
    realloc: str = "all",
) -> nn.Module:
    """Replace a model's eligible convs by selective ones, in place, without changing its outputs.

    A conv is eligible if it is exactly a torch Conv1d, Conv2d or Conv3d with a weight of its own,
    has at least `min_channels` inputs, is reached by the model's forward, is not depthwise, does
    not read the model's raw input, and is not seen to work on 1x1 maps only.

    E[X], the mean of a conv's input, has a closed form if the model's graph shows batch norm ->
    activation -> conv, also through concatenation, dropout, average pooling, upsampling, and
    zero-padded, split and shuffled channels. All other convs observe it during training.
    `sc.describe(model)` lists the outcome.

    Args:
        model: any model. Hooks, training flag, device and dtype are kept. A model that
            `torch.compile` wrapped is converted inside the wrapper. Convert a model before you
            wrap it for data parallelism.
        example_input: a tensor, a tuple of arguments, or a dict of keyword arguments. Optional. The
            model runs on it in evaluation mode, which shows the sizes of maps, the convs that read
            raw input, and the parts of a model that cannot be traced as a whole.
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
    check_count("min_channels", min_channels, 1)
    check_choice("realloc", realloc, REALLOCS)
    if where is not None:
        _check_where(where)
    with torch.random.fork_rng(_cuda_devices(root)):  # a forward may draw
        run = None if example_input is None else _watch(root, example_input)
        conv_inputs = find_conv_inputs(root, None if run is None else run.calls)
    seen = {} if run is None else run.convs
    if conv_inputs.failure is not None:
        _log.info(
            "the model cannot be traced as a whole, so more input means are observed: %s",
            conv_inputs.failure,
        )
    chosen, refused = _choose(root, conv_inputs, seen, min_channels, where)
    if not chosen:
        if selective_layers(root):
            warn("the model is already converted; nothing was changed.")
            return model
        raise ConversionError(_nothing_chosen(refused))
    layers = {
        id(conv): SELECTIVE[type(conv)].from_conv(
            conv, reallocate=_may_reallocate(conv, realloc), mean=_mean_source(conv, conv_inputs)
        )
        for conv in chosen.values()
    }
    for name, reason in refused.items():
        root.get_submodule(name)._selectconv_skipped = reason  # type: ignore[assignment]
    for parent in list(root.modules()):
        for child, conv in list(parent._modules.items()):
            if id(conv) in layers:  # a shared conv becomes one shared layer
                parent._modules[child] = layers[id(conv)]
    return model


def _choose(
    root: nn.Module,
    conv_inputs: ConvInputs,
    seen: dict[int, Seen],
    min_channels: int,
    where: Callable[[str, nn.Module], bool] | None,
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the convs to convert, by name, and why the others are refused."""
    owners = weight_owners(root)
    chosen: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    for name, conv in root.named_modules():
        if not isinstance(conv, _ConvNd) or isinstance(conv, SelectConvNd):
            continue
        reason = why_not(conv, min_channels)
        if conv is root:
            reason = "is the model itself: use its SelectConv class's from_conv"
        reason = reason or why_not_here(conv, conv_inputs, seen.get(id(conv)), owners)
        if reason is None and where is not None and not where(name, conv):
            reason = "left out by `where`"
        if reason is None:
            chosen[name] = conv
        else:
            refused[name] = reason
    return chosen, refused


def _check_where(where: Callable[[str, nn.Module], bool]) -> None:
    check_callable("where", where)
    try:
        call = where.forward if isinstance(where, nn.Module) else where
        inspect.signature(call).bind("name", None)
    except TypeError as error:
        raise TypeError(f"`where` must take a name and a conv, got {where!r}: {error}.") from error
    except ValueError:  # a builtin does not say what it takes
        return


@dataclass(frozen=True)
class _Run:
    """What running the example input showed, by `id(module)`.

    Attributes:
        convs: the convs that it reached.
        calls: how each module was called.
    """

    convs: dict[int, Seen]
    calls: dict[int, Calls]


def _watch(model: nn.Module, example_input: Any) -> _Run:
    """Run the example input and watch what is called, and what reaches each conv."""
    args, kwargs = as_arguments(example_input)
    raw = {id(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    run = _Run({}, {})

    def watch(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        settled = settled_arguments(module, inputs, keywords)
        earlier = run.calls.get(id(module), Calls(settled, 0))
        is_same = settled == earlier.settled
        run.calls[id(module)] = Calls(settled if is_same else None, earlier.number + 1)
        if not isinstance(module, _ConvNd):
            return
        x = inputs[0] if inputs else keywords["input"]
        before = run.convs.get(id(module), Seen())
        is_point = all(size == 1 for size in x.shape[-len(module.kernel_size) :])
        run.convs[id(module)] = Seen(before.only_points and is_point, before.is_raw or id(x) in raw)

    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
    ]
    try:
        with torch.no_grad(), evaluating(model):
            model(*args, **kwargs)
    except Exception as error:
        raise ConversionError(f"`example_input`: the model fails on it with {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return run


def _cuda_devices(model: nn.Module) -> list[int]:
    devices = {parameter.device for parameter in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda")


def _may_reallocate(conv: nn.Module, realloc: str) -> bool:
    assert isinstance(conv, _ConvNd)
    is_pointwise = all(size == 1 for size in conv.kernel_size)
    return realloc == "all" or (realloc == "pointwise" and is_pointwise)


def _mean_source(conv: nn.Module, conv_inputs: ConvInputs) -> MeanSource:
    shown = conv_inputs.inputs.get(id(conv))
    return ObservedMean() if shown is None or shown.source is None else shown.source


def _nothing_chosen(refused: dict[str, str]) -> str:
    if not refused:
        return "`model` has no convolutions to convert."
    reasons = "; ".join(f"{name or '(model)'}: {why}" for name, why in list(refused.items())[:5])
    more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
    if any(why == "left out by `where`" for why in refused.values()):
        return (
            f"`where` left out every eligible conv ({len(refused)} convs in all): {reasons}{more}."
        )
    return f"none of the {len(refused)} convs is eligible: {reasons}{more}."
