"""A compressed model in one file: weights, and a description of what is computed with them.

The file is a safetensors file; the description is JSON in its metadata, beside the SHA-256 of both.
Nothing is pickled.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from selectconv.checks import check_path
from selectconv.deploy.graph_description import describe_graph, rebuild_graph
from selectconv.errors import CompressionError
from selectconv.files import write_whole

FORMAT = "selectconv compressed model 1"
# What a description that was not written by `save_compressed` can lead to.
_UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


def save_compressed(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a compressed model: its weights and a description, in one safetensors file.

    The file appears whole or not at all.

    Args:
        module: what `compress` or `load_compressed` returned.
        path: the file to write.

    Raises:
        CompressionError: the model has an operation that the file format cannot express, or the
            path cannot be written.
        TypeError, ValueError: `module` is not a compressed model, or `path` is not a path.

    Example:
        >>> import tempfile
        >>> import selectconv as sc, torch
        >>> x = torch.randn(2, 3, 8, 8)
        >>> small = sc.compress(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_compressed(small, f"{folder}/small.safetensors")
        ...     again = load_compressed(f"{folder}/small.safetensors")
        >>> bool((again(x) == small(x)).all())
        True
    """
    if not isinstance(module, fx.GraphModule):
        raise TypeError(
            f"`module` must be what sc.compress returned, got {type(module).__name__}; compress it "
            "first."
        )
    target = check_path("path", path)
    description = {"format": FORMAT, **describe_graph(module)}
    tensors = {}
    for name, tensor in module.state_dict().items():
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    text = json.dumps(description, separators=(",", ":"))
    metadata = {"selectconv": text, "sha256": _digest(text, tensors)}
    from safetensors.torch import save  # `import selectconv` is torch and numpy alone

    content = save(tensors, metadata)
    write_whole(target, lambda file: file.write(content), error=CompressionError, shared=True)


def load_compressed(path: str | os.PathLike[str]) -> fx.GraphModule:
    """Load a compressed model; the source code of the original model is not needed.

    Args:
        path: a file that `save_compressed` wrote.

    Returns:
        The model, on the CPU and in evaluation mode.

    Raises:
        CompressionError: the file is not a compressed model, is damaged, or its description does
            not match its weights.
        TypeError, ValueError: `path` is not a path.

    Example:
        >>> load_compressed("missing.safetensors")
        Traceback (most recent call last):
        ...
        selectconv.errors.CompressionError: missing.safetensors is not a compressed model: ...
    """
    tensors, description = _read(check_path("path", path))
    try:
        module = rebuild_graph(description, tensors)
        _fill(module, tensors)
        return module.eval()
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}") from error
    except _UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CompressionError(
            f"{path}: the description cannot be read, or does not match the weights ({reason})."
        ) from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):  # unlike Path.is_file, this takes names of any length
        reason = "it is a folder" if os.path.isdir(path) else "there is no such file"
        raise CompressionError(f"{path} is not a compressed model: {reason}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, in aligned memory: BLAS rounds differently on parts of the file's own memory.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CompressionError(f"{path} is not a compressed model: {reason}.") from error
    try:
        description = json.loads(metadata["selectconv"])
        found = description["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise CompressionError(
            f"{path} is not a compressed model: it holds weights without a description."
        ) from error
    if metadata.get("sha256") != _digest(metadata["selectconv"], tensors):
        raise CompressionError(f"{path} is damaged: it is not what was saved; save it again.")
    if found != FORMAT:
        raise CompressionError(f"{path} has the format {found!r}; this version reads {FORMAT!r}.")
    return tensors, description


def _digest(description: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all that a file says, whatever the order of its tensors."""
    digest = hashlib.sha256(description.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fill(module: fx.GraphModule, tensors: dict[str, Tensor]) -> None:
    """Give a module its weights, after checking that none is missing and none is left over."""
    wanted = module.state_dict()
    problems = [f"{name!r} is missing" for name in wanted if name not in tensors]
    problems += [f"{name!r} is not expected" for name in tensors if name not in wanted]
    problems += [
        f"{name!r} has shape {tuple(tensors[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CompressionError(
            f"the description does not match the weights: {'; '.join(problems[:3])}{more}."
        )
    module.load_state_dict(tensors, assign=True)
    for name, value in module.named_parameters():
        value.requires_grad_(tensors[name].is_floating_point())
