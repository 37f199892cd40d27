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
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from selectconv.checks import check_choice, check_path
from selectconv.core.models import selective_layers, unwrap
from selectconv.deploy.compress import check_same, compress, tensors_in
from selectconv.errors import CompressionError, ExportError, SelectConvWarning
from selectconv.extras import import_extra
from selectconv.files import write_whole
from selectconv.graph.example import as_arguments, evaluating

TOLERANCE = 1e-3
BATCHES = (1, 3)
_STANDARD_DOMAINS = {"", "ai.onnx"}
_import = partial(
    import_extra, purpose="ONNX export", install="selectconv[onnx]", error=ExportError
)


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_input: Any,
    *,
    dynamic: str | None = None,
) -> None:
    """Compress a model and write it as ONNX, with standard operators only, for any batch size.

    onnxruntime runs the model on batches of 1 and 3, and its outputs are compared with PyTorch's.
    Only then is the file written, whole or not at all. Outputs in a dict keep their names, as in
    "boxes" or "maps.p3"; others are called "output" or "output.0". Needs selectconv[onnx].

    Args:
        model: a selective or plain model, which is compressed first, or what `compress` returned.
            It does not change.
        path: the file to write.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. The first axis
            of every tensor is the batch.
        dynamic: "size": for any size of maps as well, which is checked on larger ones. None: for
            the size of the example.

    Raises:
        CompressionError: a selective model cannot be compressed.
        ExportError: a package of selectconv[onnx] is missing, the path cannot be written, the model
            cannot be expressed in ONNX, is fixed to its size, or the outputs differ.
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
    if dynamic is not None:
        check_choice("dynamic", dynamic, ("size",))
    arguments = as_arguments(example_input)
    larger = tree_map(_enlarge, arguments)
    with _blaming_the_size(dynamic), warnings.catch_warnings():
        if dynamic:
            _outputs(unwrap(model), larger)  # one that fails on other sizes says so itself
            warnings.filterwarnings("error", ".*depends on shapes", SelectConvWarning)
        plain = _as_plain(model, example_input)
        with _quiet(), evaluating(plain):
            content = _export(plain, arguments, dynamic)
    run = open_session(content)
    for batch in BATCHES:
        _compare(run, plain, arguments, batch)
        if dynamic:
            with _blaming_the_size(dynamic):
                _compare(run, unwrap(model), larger, batch)
    write_whole(target, content, error=ExportError, shared=True)


@contextmanager
def _blaming_the_size(dynamic: str | None) -> Iterator[None]:
    """Say of anything that fails, if sizes are dynamic, that they cannot be."""
    try:
        yield
    except Exception as error:  # of the model, the exporter or the runtime
        if dynamic is None or isinstance(error, CompressionError):
            raise
        raise ExportError(
            f"`dynamic` {dynamic!r}: the model is fixed to the size of `example_input`, so leave "
            f"`dynamic` out: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _enlarge(value: Any) -> Any:
    """Repeat maps: twice along their first axis, and three times along the others."""
    if not isinstance(value, Tensor) or value.ndim < 3:
        return value
    return value.repeat(1, 1, *(2, 3, 3)[: value.ndim - 2])


def _outputs(model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    with torch.no_grad(), evaluating(model):
        return model(*arguments[0], **arguments[1])


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
        raise ExportError(f"onnxruntime cannot load the model: {_one_line(error)}") from error
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


def _export(plain: nn.Module, arguments: Any, dynamic: str | None) -> bytes:
    # A batch of 1 would be taken for a constant.
    args, kwargs = _with_batch(arguments, 2)
    shapes = tree_map(partial(_axes, dynamic=dynamic), args or kwargs)
    try:
        program = torch.onnx.export(
            plain, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        assert program is not None
        proto = program.model_proto
        # Noted shapes can be inferred, and onnxruntime's quantizer trips over them: it transposes
        # weights, whose noted shape is then wrong.
        del proto.graph.value_info[:]
        _name_outputs(proto.graph, _outputs(plain, (args, kwargs)))
        _import("onnx").checker.check_model(proto)
        content = bytes(proto.SerializeToString())
    except Exception as error:  # anything may fail inside the exporter
        raise ExportError(f"the model cannot be expressed in ONNX: {_one_line(error)}") from error
    foreign = {node.domain for node in proto.graph.node} - _STANDARD_DOMAINS
    if foreign or proto.functions:
        raise ExportError(
            f"the model needs operators that are not standard, from {sorted(foreign)}."
        )
    return content


def _axes(value: Any, dynamic: str | None) -> dict[int, Any] | None:
    """Name the axes of an input whose sizes stay open."""
    if not isinstance(value, Tensor):
        return None
    if dynamic is None:
        # torch 2.7 wants to know that a batch is smaller than the end of the slice in x[:, 1:].
        return {0: torch.export.Dim("batch", max=2**31 - 1)}
    names = ("depth", "height", "width")[max(0, 5 - value.ndim) :]
    return {0: "batch", **dict(enumerate(names, start=2))}


def _name_outputs(graph: Any, outputs: Any) -> None:
    """Name the outputs of an ONNX graph as the model does; other values with these names give way.

    Args:
        graph: an ONNX graph.
        outputs: the model's.
    """
    kinds = (Tensor,) if len(tensors_in(outputs)) == len(graph.output) else (Tensor, int)
    root = [] if isinstance(outputs, dict) else ["output"]
    names = [
        ".".join([*root, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)])
        for path, leaf in tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, kinds)
    ]
    inputs = {value.name for value in graph.input}
    named = {
        value.name: f"{name}_out" if name in inputs else name
        for value, name in zip(graph.output, names, strict=True)
    }
    new = {name: f"{name}_inside" for name in names} | named | {name: name for name in inputs}
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in (*graph.initializer, *graph.output):
        value.name = new.get(value.name, value.name)


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
    run: Callable[..., list[Tensor]], plain: nn.Module, arguments: Any, batch: int
) -> None:
    """Raise an error if onnxruntime computes something else for a batch of this size."""
    args, kwargs = _with_batch(arguments, batch)
    outputs = tree_leaves(_outputs(plain, (args, kwargs)))
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
