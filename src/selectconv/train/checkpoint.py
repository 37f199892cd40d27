"""`last.ckpt`: everything that `--resume` needs, in plain types that load without pickle's code."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from selectconv.errors import RunError
from selectconv.files import write_whole
from selectconv.train.slimming import fit_shapes

FORMAT = 1
_KEYS = {"format", "epoch", "model", "optimizer", "allocator", "best_error"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole, or leave the one before it as it was.

    Raises:
        RunError: it could not be written, for example because the disk is full.
    """
    assert set(state) | {"format"} == _KEYS
    write_whole(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        RunError: it is damaged, or of another format; it is named and left as it is.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way inside the reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"the checkpoint {path} is damaged and cannot be read: {reason}") from error
    if not isinstance(state, dict) or set(state) != _KEYS:
        raise RunError(f"the checkpoint {path} was not written by selectconv.")
    if state["format"] != FORMAT:
        raise RunError(
            f"the checkpoint {path} has format {state['format']!r}; this version reads {FORMAT}."
        )
    return state


def save_weights(path: Path, model: nn.Module) -> None:
    """Write a model's state_dict as safetensors, whole."""
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()
    }
    write_whole(path, lambda file: file.write(save(tensors)))


def load_weights(path: Path, model: nn.Module, *, slimmed: bool = False) -> None:
    """Load a safetensors file into a model.

    Args:
        path: the file.
        model: the run's network.
        slimmed: channels may have been cut: narrow the model's layers to the file's shapes.

    Raises:
        RunError: the file is missing, damaged, or of another model.
    """
    from safetensors.torch import load_file

    if not path.exists():
        raise RunError(f"there is no {path}: the run has not finished an epoch yet.")
    try:
        tensors = load_file(path)
    except Exception as error:
        raise RunError(f"{path} is damaged and cannot be read: {error}") from error
    try:
        if slimmed:
            fit_shapes(model, tensors)
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {str(error).splitlines()[0]}") from error
