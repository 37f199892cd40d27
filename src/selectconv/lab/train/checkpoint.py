"""A run's files of weights, and `last.ckpt`: everything that `--resume` needs, in plain types."""

import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from selectconv.errors import RunError
from selectconv.files import replacing
from selectconv.lab.train.digests import (
    check_recorded,
    is_unchanged,
    record,
    recorded,
    settle,
    write_recorded,
)
from selectconv.lab.train.run_folder import PREVIOUS

FORMAT = 1
_KEYS = {"format", "epoch", "model", "optimizer", "allocator", "best_error"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole; the one before it stays as `previous.ckpt`.

    Raises:
        RunError: it could not be written, for example because the disk is full; the one before it
            is still in its place.
    """
    assert set(state) | {"format"} == _KEYS
    if path.exists():
        previous = path.with_name(PREVIOUS)
        record(previous, [*recorded(previous), *recorded(path)])
        try:
            with replacing(previous) as beside:
                _link(path, beside)
        except OSError as error:
            raise RunError(f"{previous} cannot be written: {error.strerror or error}.") from error
        settle(previous)
    # To memory first: torch's writer, on a full disk, can fail with an error that does not say so.
    content = io.BytesIO()
    torch.save({"format": FORMAT, **state}, content)
    write_recorded(path, lambda file: file.write(content.getbuffer()))


def _link(path: Path, other: Path) -> None:
    """Link `other` to a file, or copy the file if the file system has no links."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def has_checkpoint(path: Path) -> bool:
    """Return whether a run can go on from its last checkpoint.

    Raises:
        RunError: it is gone, and the one before it is still there.
    """
    if not path.exists() and path.with_name(PREVIOUS).exists():
        raise RunError(f"the checkpoint {path} is missing. {_offer(path.with_name(PREVIOUS))}")
    return path.exists()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        RunError: it is damaged, or of another format; it is named and left as it is, and so is the
            one before it, if that is whole.
    """
    previous = path.with_name(PREVIOUS)
    if not is_unchanged(path, previous):  # the one before it may have been put in its place
        raise RunError(
            f"the checkpoint {path} is damaged: it is not what the run wrote. {_offer(previous)}"
        )
    return _read(path, lambda: _offer(previous))


def _offer(previous: Path) -> str:
    """Say how to go on without the last checkpoint."""
    if previous.exists() and is_unchanged(previous):
        try:
            epoch = _read(previous)["epoch"]
        except RunError:
            pass
        else:
            return (
                f"The one before it, of epoch {epoch}, is intact: rename {previous.name} to "
                "last.ckpt, then --resume."
            )
    return "Start again with --overwrite."


def _read(path: Path, remedy: Callable[[], str] = lambda: "") -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way inside the reader
        # torch's own message suggests weights_only=False, so it is not repeated.
        kind = type(error).__name__
        raise RunError(
            f"the checkpoint {path} is damaged and cannot be read ({kind}). {remedy()}"
        ) from error
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
    write_recorded(path, lambda file: file.write(save(tensors)))


def load_weights(path: Path, model: nn.Module, *, slimmed: bool = False) -> None:
    """Load a safetensors file into a model.

    Args:
        path: the file.
        model: the run's network.
        slimmed: channels may have been cut: narrow the model's layers to the file's shapes.

    Raises:
        RunError: the file is missing, damaged, or of another model.
    """
    if not path.exists():
        raise RunError(f"there is no {path}: the run has not finished an epoch yet.")
    check_recorded(path, "restore it, or train again.")
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


def fit_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Narrow a model's layers, in place, to the shapes of a slimmed model's state_dict.

    What was narrowed holds new tensors of unset values, for `load_state_dict` to fill.

    Raises:
        RunError: the shapes are not those of a slimmed copy of the model; nothing was changed.
    """
    narrowed: list[tuple[nn.Module, str, Tensor]] = []
    for name, module in model.named_modules():
        for key, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            stored = weights.get(f"{name}.{key}" if name else key)
            if stored is None or stored.shape == tensor.shape:
                continue  # what is missing, load_state_dict names
            is_narrower = stored.ndim == tensor.ndim and all(
                have <= most for have, most in zip(stored.shape, tensor.shape, strict=True)
            )
            if not is_narrower or type(module) not in (nn.Conv2d, nn.BatchNorm2d, nn.Linear):
                raise RunError(
                    f"`{name}.{key}` has shape {tuple(stored.shape)}, which slimming cannot make "
                    f"of the network's {tuple(tensor.shape)}."
                )
            narrowed.append((module, key, torch.empty_like(stored, device=tensor.device)))
    for module, key, tensor in narrowed:
        is_parameter = key in module._parameters
        setattr(module, key, nn.Parameter(tensor) if is_parameter else tensor)
    for module, _, _ in narrowed:
        if isinstance(module, nn.Conv2d):
            module.out_channels = module.weight.shape[0]
            module.in_channels = module.weight.shape[1] * module.groups
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features = module.weight.shape[0]
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
