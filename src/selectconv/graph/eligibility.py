"""Which convs can be selective, and why the others cannot."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from selectconv.core.layer import SelectConv1d, SelectConv2d, SelectConv3d, SelectConvNd
from selectconv.graph.input_mean import ConvInputs
from selectconv.tables import counted

MIN_CHANNELS = 8
SELECTIVE: dict[type[nn.Module], type[SelectConvNd]] = {
    nn.Conv1d: SelectConv1d,
    nn.Conv2d: SelectConv2d,
    nn.Conv3d: SelectConv3d,
}


@dataclass(frozen=True)
class Seen:
    """What running the example input showed of a conv's inputs."""

    only_points: bool = True
    is_raw: bool = False


def weight_owners(model: nn.Module) -> dict[int, int]:
    """Count the modules that hold each parameter."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def why_not(conv: _ConvNd, min_channels: int) -> str | None:
    """Say why a conv cannot be selective wherever it stands."""
    if isinstance(conv._parameters.get("weight"), UninitializedParameter):
        return "not initialised: give `example_input`, or run the model once"
    if type(conv) not in SELECTIVE:
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
        return f"{counted(conv.in_channels, 'input')}, fewer than min_channels={min_channels}"
    return None


def why_not_here(
    conv: _ConvNd, conv_inputs: ConvInputs, seen: Seen | None, owners: dict[int, int]
) -> str | None:
    """Say why a conv cannot be selective in this model."""
    if owners[id(conv.weight)] > 1:
        return "shares its weight with another module"
    shown = conv_inputs.inputs.get(id(conv))
    if (shown is not None and shown.is_raw) or (seen is not None and seen.is_raw):
        return "fed with raw input"
    if seen is not None and seen.only_points:
        return "works on 1x1 maps only: nothing to shift"
    if conv_inputs.failure is None and shown is None and seen is None:
        return "not reached by the model's forward"
    return None
