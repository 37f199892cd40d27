"""Find and count a model's selective layers; unwrap models."""

import torch
from torch import Tensor, nn

from selectconv.core.layer import SelectConvNd
from selectconv.errors import BadType

# torch's two generations of FSDP; to import them takes long.
_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}
PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Averages of the weights: torch's, and timm's by name.
_AVERAGES = {"AveragedModel", "ModelEmaV2", "ModelEmaV3"}


def selective_layers(model: nn.Module) -> dict[str, SelectConvNd]:
    """Return a model's selective layers by dotted name, in the order of its modules."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SelectConvNd)}


def allocation_of(layer: SelectConvNd) -> list[Tensor]:
    """Return the tensors that are a layer's allocation, its shifts included."""
    tensors = (layer.gate, layer.index, layer.moved, layer.shifted, layer.shift)
    return [tensor for tensor in tensors if tensor is not None]


def count_slots(model: nn.Module) -> dict[str, int]:
    """Count the open slots of a model that were re-allocated, `moved`, and the `closed` ones."""
    layers = selective_layers(model).values()
    return {
        "moved": sum(int((layer.moved & layer.gate).sum()) for layer in layers),
        "closed": sum(int((~layer.gate).sum()) for layer in layers),
    }


def unwrap(model: nn.Module) -> nn.Module:
    """Take a model out of the wrappers of torch.compile, DDP and weight averaging.

    Raises:
        TypeError: `model` is not a module, or one that is scripted or sharded.
    """
    model = unwrap_compiled(model)
    while isinstance(model, PARALLEL) or _is_a(model, _AVERAGES):
        model = unwrap_compiled(model.get_submodule("module"))
    return model


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Take a model out of torch.compile's wrapper alone.

    Raises:
        TypeError: `model` is not a module, or one that is scripted or sharded.
    """
    if not isinstance(model, nn.Module):
        raise BadType(f"`model` must be an nn.Module, got {type(model).__name__}.")
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise BadType(
            "`model` is scripted or traced by torch.jit, which hides its layers: give the module "
            "that it was made from."
        )
    if any(_is_a(module, _SHARDED) for module in model.modules()):
        raise BadType(
            "`model` is sharded by FSDP, which is not supported: the damage of closing a slot "
            "needs whole weights. Give the model as it was before, and train it with "
            "DistributedDataParallel."
        )
    return model


def _is_a(module: nn.Module, names: set[str]) -> bool:
    """Return whether a module is of a class with one of these names, or of a subclass."""
    return not names.isdisjoint(kind.__name__ for kind in type(module).__mro__)
