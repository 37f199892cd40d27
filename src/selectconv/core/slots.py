"""A layer's slots: what it holds of each, and how to write and read it."""

import itertools
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from selectconv.core.mean_source import MeanSource
from selectconv.errors import AllocationError, ExportError

new_family = itertools.count().__next__
# All selective layers of this process, so that an average beside a model can be noticed.
living_layers: WeakSet[Any] = WeakSet()


class SlottedConv(nn.modules.conv._ConvNd):
    """What a selective layer holds, declared; `SelectConvNd` is the layer.

    Attributes:
        gate: (I,) bool buffer, g: the open slots.
        index: (I,) int64 buffer, pi: the channel that each slot reads.
        moved: (I,) bool buffer: the slots that have been re-allocated.
        shifted: (I,) bool buffer: the slots that read with a shift.
        shift: (I, spatial axes) parameter, b: the shifts in pixels. None: the layer does not
            re-allocate.
        learns_shift: whether training changes the shifts; otherwise their gradient is zero.
        weight_std: standard deviation of the normal distribution that this layer's weights were
            drawn from, for R^random. None: torch's own initialisation of convs.
        family: a number that a layer and its copies have in common.
        num_loads: how often a state was loaded into the layer.
        mean_source: where E[X] comes from: a `BatchNormMean`, an `ObservedMean`, or None.
    """

    gate: Tensor
    index: Tensor
    moved: Tensor
    shifted: Tensor
    shift: nn.Parameter | None
    learns_shift: bool = True
    weight_std: float | None = None
    family: int
    num_loads: int = 0
    observed_mean: Tensor
    observed_var: Tensor
    observed_batches: Tensor
    mean_source: MeanSource | None = None
    _conv_forward: Callable[..., Tensor]  # of nn.Conv1d, nn.Conv2d or nn.Conv3d

    @property
    def is_frozen(self) -> bool:
        """Whether the weight needs no gradient; a recomputed weight is not looked at."""
        weight = self._parameters.get("weight")
        return weight is not None and not weight.requires_grad

    def __prepare_scriptable__(self) -> NoReturn:
        """Tell `torch.jit.script`, which asks every module, what to do instead."""
        raise ExportError(
            "torch.jit.script does not take a model with selective layers: script the plain one "
            "that sc.compress(model, example_input) returns."
        )


def torch_conv(conv: nn.Module) -> type[nn.Module] | None:
    """Return torch's class that computes what `conv` does; None: it may compute something else.

    A subclass may have a constructor, an initialisation and private helpers of its own. Methods
    that a model could call, or that replace torch's, would be lost with it.
    """
    kind: Any = type(conv)
    for plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if issubclass(kind, plain) and kind.__call__ == plain.__call__:
            has_others = any(
                (callable(value) or isinstance(value, property))
                and name not in ("reset_parameters", "extra_repr")
                and (hasattr(plain, name) or not name.startswith("_"))
                for one in kind.__mro__[: kind.__mro__.index(plain)]
                for name, value in vars(one).items()
                if not name.startswith("__")
            )
            return None if has_others else plain
    return None


def is_patched(conv: nn.Module) -> bool:
    """Return whether an instance has a forward of its own."""
    return not {"forward", "_conv_forward"}.isdisjoint(vars(conv))


def fresh_slots(slots: int, device: torch.device) -> dict[str, Tensor]:
    """Return the buffers of a layer of which nothing was closed or moved yet."""
    return {
        "gate": torch.ones(slots, dtype=torch.bool, device=device),
        "index": torch.arange(slots, device=device),
        "moved": torch.zeros(slots, dtype=torch.bool, device=device),
        "shifted": torch.zeros(slots, dtype=torch.bool, device=device),
    }


def complete_state(layer: SlottedConv, state: dict[str, Any], prefix: str) -> None:
    """Add a fresh allocation to a `state` without any, that of a plain conv; check another's.

    Raises:
        AllocationError: the state names channels that the layer does not have.
    """
    own = {name: value for name, value in layer._buffers.items() if value is not None}
    if layer.shift is not None:
        own["shift"] = layer.shift
    if not any(prefix + name in state for name in own):
        weight = state.get(prefix + "weight")
        # The layer itself may be on the meta device.
        device = layer.weight.device if weight is None else weight.device
        fresh = {name: torch.zeros_like(value, device=device) for name, value in own.items()}
        fresh.update(fresh_slots(layer.in_channels, device))
        state.update({prefix + name: value for name, value in fresh.items()})
    index = state.get(prefix + "index")
    if isinstance(index, Tensor) and index.numel() and not index.is_meta:
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= layer.in_channels:
            raise AllocationError(
                f"`{prefix}index` names the channels {low} to {high}; the layer has 0 to "
                f"{layer.in_channels - 1}: the state is damaged, or from another model."
            )


def split_groups(tensor: Tensor, groups: int) -> Tensor:
    """View (O, I / groups, ...), a weight's layout, as (groups, O / groups, I / groups, ...)."""
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])


def write_slots(tensor: Tensor, groups: int, slots: Tensor, value: Tensor | None = None) -> None:
    """Write what belongs to `slots` in a tensor laid out as a weight or a shift.

    Args:
        tensor: a weight, a shift, or the optimizer's state of one.
        groups: of the conv.
        slots: int64.
        value: weights (slots, O / groups, ...). None: zeros.
    """
    slots = slots.to(tensor.device)
    if value is None and (groups == 1 or tensor.ndim <= 2):  # many times faster than what follows
        tensor.index_fill_(0 if tensor.ndim <= 2 else 1, slots, 0)  # a shift has a row per slot
        return
    width = tensor.shape[1]
    written = 0.0 if value is None else value.to(tensor)
    split_groups(tensor, groups)[slots // width, :, slots % width] = written


def mask_weight(layer: SlottedConv) -> Tensor:
    """Return a layer's weight with zeros where slots are closed."""
    gate, weight = layer.gate, layer.weight
    if layer.groups > 1:
        by_group = gate.view(layer.groups, 1, -1)
        gate = by_group.expand(-1, layer.out_channels // layer.groups, -1)
    shape = (-1, weight.shape[1], *[1] * (weight.ndim - 2))
    return torch.where(gate.reshape(shape), weight, 0.0)


def draw_weights(layer: SlottedConv, count: int, seed: int) -> Tensor:
    """Draw weights (count, O / groups, ...) from the layer's own initialisation: R^random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, layer.out_channels // layer.groups, *layer.kernel_size)
    if layer.weight_std is not None:
        return torch.randn(shape, generator=generator, device="cpu") * layer.weight_std
    # torch draws a conv's weights from U(-bound, bound) with bound = 1 / sqrt(fan in).
    bound = layer.weight[0].numel() ** -0.5
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
