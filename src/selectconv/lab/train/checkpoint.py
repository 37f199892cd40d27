"""A run's weights, and its checkpoint: everything that `--resume` needs, in plain types."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from selectconv.errors import RunError
from selectconv.lab.train.manifest import CHECKPOINT
from selectconv.lab.train.run_folder import RunFolder

FORMAT = 1


def dump_checkpoint(state: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, **state}, content)
    return content.getvalue()


def load_checkpoint(folder: RunFolder) -> dict[str, Any]:
    """Read a run's checkpoint.

    Raises:
        RunError: it is damaged, or of another format; it is named and left as it is.
    """
    path = folder.check(CHECKPOINT)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"]
    except Exception as error:  # a damaged file can fail in any way inside the reader
        # torch's own message suggests weights_only=False, so it is not repeated.
        kind = type(error).__name__
        raise RunError(f"{path} is damaged: it cannot be read ({kind}).") from error
    if found != FORMAT:
        raise RunError(f"{path} has format {found!r}; this version reads {FORMAT}.")
    return state


def dump_weights(model: nn.Module) -> bytes:
    """Return a model's state_dict in the format of safetensors."""
    state = model.state_dict()
    return save({name: value.detach().cpu().contiguous() for name, value in state.items()})


def load_weights(path: Path, model: nn.Module, *, slimmed: bool = False) -> None:
    """Load a run's file of weights into a model.

    Args:
        path: the file.
        model: the run's network.
        slimmed: channels may have been cut: narrow the model's layers to the file's shapes.

    Raises:
        RunError: the file is missing, damaged, or of another model.
    """
    tensors = load_file(RunFolder(path.parent).check(path.name))
    try:
        if slimmed:
            fit_shapes(model, tensors)
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {str(error).splitlines()[0]}") from error


def fit_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model's layers, in place, the shapes of a slimmed model's state_dict.

    What changes holds new tensors of unset values, for `load_state_dict` to fill.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            continue
        for key, tensor in module.state_dict().items():
            stored = weights[f"{name}.{key}"]
            if stored.shape != tensor.shape:
                new = torch.empty_like(stored, device=tensor.device)
                setattr(module, key, nn.Parameter(new) if key in module._parameters else new)
        width = len(module.weight)
        if isinstance(module, nn.Conv2d):
            module.out_channels, module.in_channels = width, module.weight.shape[1] * module.groups
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features = width
        else:
            module.out_features, module.in_features = module.weight.shape
