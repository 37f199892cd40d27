"""ONNX export, compared with PyTorch before the file appears."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from selectconv.checks import check_path
from selectconv.core.models import selective_layers, unwrap
from selectconv.deploy.compress import check_same, compress, tensors_in
from selectconv.errors import CompressionError, ExportError
from selectconv.extras import import_extra
from selectconv.files import write_whole
from selectconv.graph.example import as_arguments, evaluating

TOLERANCE = 1e-3
BATCHES = (1, 3)
_STANDARD_DOMAINS = {"", "ai.onnx"}
_import = partial(
    import_extra, purpose="ONNX export", install="selectconv[onnx]", error=ExportError
)


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example_input: Any) -> None:
    """Compress a model and write it as ONNX, with standard operators only, for any batch size.

    onnxruntime runs the model on batches of 1 and 3, and its outputs are compared with PyTorch's.
    Only then is the file written, whole or not at all. Needs selectconv[onnx].

    Args:
        model: a selective or plain model, which is compressed first, or what `compress` returned.
            It does not change.
        path: the file to write.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. The first axis
            of every tensor is the batch.

    Raises:
        CompressionError: a selective model cannot be compressed.
        ExportError: a package of selectconv[onnx] is missing, the path cannot be written, the model
            cannot be expressed in ONNX, or the outputs differ.
        TypeError, ValueError: an argument is not accepted.

    Example:
        >>> import tempfile
        >>> import selectconv as sc
        >>> model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     sc.export_onnx(model, f"{folder}/model.onnx", x)
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _import(package)
    target = check_path("path", path)
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ExportError(f"{target} cannot be written: it must be a file in a writable folder.")
    plain = _as_plain(model, example_input)
    with _quiet(), evaluating(plain):
        content = _export(plain, example_input)
    run = open_session(content)
    for batch in BATCHES:
        _compare(run, plain, example_input, batch)
    write_whole(target, content, error=ExportError, shared=True)


def open_session(model: bytes | str | os.PathLike[str]) -> Callable[..., list[Tensor]]:
    """Return a function that runs an ONNX model on tensors, with as many threads as torch uses.

    Raises:
        ExportError: onnxruntime is not installed, or cannot run the model.
    """
    onnxruntime = _import("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    content = model if isinstance(model, bytes) else os.fspath(model)
    try:
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no base of their own
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"onnxruntime cannot load the model: {reason}") from error
    names = [entry.name for entry in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {
            name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)
        }
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run


def _as_plain(model: nn.Module, example_input: Any) -> nn.Module:
    """Compress a model unless it is compressed, or is plain and cannot be traced."""
    model = unwrap(model)
    if isinstance(model, fx.GraphModule):
        return model
    try:
        return compress(model, example_input)
    except CompressionError:
        if selective_layers(model):
            raise
        return model


def _export(plain: nn.Module, example_input: Any) -> bytes:
    # A batch of 1 would be taken for a constant.
    args, kwargs = _with_batch(as_arguments(example_input), 2)
    batch = torch.export.Dim("batch")
    shapes = tree_map(
        lambda value: {0: batch} if isinstance(value, Tensor) else None, args or kwargs
    )
    try:
        program = torch.onnx.export(
            plain, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        assert program is not None
        proto = program.model_proto
        # Noted shapes can be inferred, and onnxruntime's quantizer trips over them: it transposes
        # weights, whose noted shape is then wrong.
        del proto.graph.value_info[:]
        _import("onnx").checker.check_model(proto)
        content = bytes(proto.SerializeToString())
    except Exception as error:  # anything may fail inside the exporter
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"the model cannot be expressed in ONNX: {reason}") from error
    foreign = {node.domain for node in proto.graph.node} - _STANDARD_DOMAINS
    if foreign or proto.functions:
        raise ExportError(
            f"the model needs operators that are not standard, from {sorted(foreign)}."
        )
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and logs; its exceptions say what went wrong."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _with_batch(value: Any, batch: int) -> Any:
    """Repeat a batch's examples, each repetition scaled down, until there are `batch` of them."""

    def resize(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            return tensor
        rows = torch.arange(batch, device=tensor.device) % len(tensor)
        resized = tensor.detach()[rows]
        if not resized.is_floating_point():
            return resized
        scale = 0.7 ** torch.arange(batch, device=tensor.device, dtype=resized.dtype)
        return resized * scale.view(-1, *[1] * (tensor.ndim - 1))

    return tree_map(resize, value)


def _compare(
    run: Callable[..., list[Tensor]], plain: nn.Module, example_input: Any, batch: int
) -> None:
    """Raise an error if onnxruntime computes something else for a batch of this size."""
    args, kwargs = _with_batch(as_arguments(example_input), batch)
    with torch.no_grad(), evaluating(plain):
        outputs = tree_leaves(plain(*args, **kwargs))
    wanted, got = tensors_in(outputs), run(*tensors_in((args, kwargs)))
    if len(wanted) < len(got):  # sizes, such as x.shape[0], are outputs as well
        wanted = [torch.as_tensor(value) for value in outputs if isinstance(value, Tensor | int)]
    if len(wanted) != len(got):
        raise ExportError(
            f"the model returns {len(wanted)} tensors, and {len(got)} in ONNX; no file was written."
        )
    check_same(
        plain, (args, kwargs), wanted, got, rtol=TOLERANCE, error=ExportError,
        what=f"in onnxruntime, for a batch of {batch}, differs from PyTorch's",
    )  # fmt: skip
