"""Tracing a model whose forward depends on shapes: it is traced for those of an example.

To torch.fx a value is unknown, so that it cannot decide `if x.shape[-1] > 16`. Here every value
also has its counterpart on the example: a tensor with a shape, but without data. Sizes are plain
numbers, except on the first axis, where they are asked for as the model runs: batches may still
have any size. There is no data to look at, so what depends on the values of a tensor is refused.
"""

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.node import map_aggregate

from selectconv.core.layer import SelectConvNd
from selectconv.graph.tracer import Proxy, Tracer

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_TRACERS = tuple(f"{Path(home).parent}{os.sep}" for home in (torch.__file__, __file__))
_LONGEST_LINE = 80


class DependsOnValues(fx.proxy.TraceError):
    """A forward depends on the values of a tensor."""


class FixedShapeTracer(Tracer):
    """Traces a model for the shapes of an example, and for those of its arguments that are plain.

    Args:
        is_leaf: return whether a module is to be seen as one step.
        arguments: the example's, by the names that the model's forward gives them.
        keeps_batch: leave the first axis free, as long as the forward does not need its size.

    Attributes:
        keeps_batch: whether it was left free.
    """

    def __init__(
        self,
        is_leaf: Callable[[nn.Module], bool],
        arguments: Mapping[str, Any],
        *,
        keeps_batch: bool = True,
    ) -> None:
        super().__init__(is_leaf)
        self.keeps_batch = keeps_batch
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._arguments: Any = map_aggregate(dict(arguments), self._without_data)
        self._is_running = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make the value that stands for a step while the model's code runs."""
        return _ShapedProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        """Record a step and run it without data; return plain results as they are."""
        if kind == "placeholder":
            value = self._arguments.get(str(target).lstrip("*"))
        elif kind == "call_method" and target == "size":
            sizes = self.sizes(args[0])
            axis = args[1] if len(args) > 1 else kwargs.get("dim")
            return sizes if axis is None else sizes[axis]
        else:
            value = self._run(kind, target, args, kwargs)
            if isinstance(value, _PLAIN) and not _has_plain(args, kwargs):
                return value
        proxy: Any = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        proxy.value = value
        # An argument that is not a tensor may decide what is computed: it is part of the example.
        return value if kind == "placeholder" and (value is None or _is_plain(value)) else proxy

    def sizes(self, proxy: "_ShapedProxy") -> tuple[Any, ...]:
        """Return a tensor's sizes: numbers, but for the first of what is not a parameter."""
        shape = tuple(proxy.value.shape)
        if not shape or not self.keeps_batch or proxy.node.op == "get_attr":
            return shape
        first: Any = super().create_proxy("call_method", "size", (proxy, 0), {})
        first.value = shape[0]
        return (first, *shape[1:])

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a module, or just make it where a step is run without data."""
        if self._is_running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Look up an attribute of a module: a parameter is a step unless one is being run."""
        if self._is_running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a condition."""
        return bool(_number(obj, "a condition"))

    def iter(self, obj: Any) -> Iterator[Any]:
        """Go through the parts of a value."""
        return (obj[place] for place in range(len(obj)))

    def _without_data(self, value: Any) -> Any:
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = (map_aggregate(part, _value_of) for part in (args, kwargs))
        self._is_running = True
        try:
            with self._mode, torch.no_grad():
                if kind == "call_function":
                    return target(*args, **kwargs)
                if kind == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                owner, _, name = str(target).rpartition(".")
                found = getattr(self.root.get_submodule(owner), name)
                if kind == "get_attr":
                    return found
                if isinstance(found, SelectConvNd):  # whose kernels need data
                    return super(SelectConvNd, found).forward(*args, **kwargs)
                return found(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DependsOnValues("what it computes") from error
        finally:
            self._is_running = False


class _ShapedProxy(Proxy):
    """A proxy that knows what it stands for on the example.

    Attributes:
        value: tensors are without data.
    """

    value: Any = None

    def __getattr__(self, k: str) -> Any:
        found = getattr(self.value, k)
        tracer: Any = self.tracer
        if isinstance(self.value, Tensor) and k == "shape":
            return tracer.sizes(self)
        if callable(found):
            return super().__getattr__(k)
        return tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        if isinstance(self.value, Tensor):
            return operator.index(self.shape[0])
        return len(self.value)

    def __index__(self) -> int:
        return int(_number(self, "a number"))

    def __int__(self) -> int:
        return int(_number(self, "a number"))

    def __float__(self) -> float:
        return float(_number(self, "a number"))


def _number(proxy: Any, what: str) -> Any:
    """Return the plain value that a proxy has on the example."""
    if isinstance(proxy.value, Tensor):
        raise DependsOnValues(what)
    if _is_plain(proxy.value):  # it depends on the size of the batch
        proxy.tracer.keeps_batch = False
    return proxy.value


def _value_of(arg: Any) -> Any:
    return arg.value if isinstance(arg, _ShapedProxy) else arg


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _has_plain(*parts: Any) -> bool:
    """Return whether a value among arguments is plain, but asked for as the model runs."""
    found: list[Any] = []
    for part in parts:
        map_aggregate(part, found.append)
    return any(isinstance(arg, _ShapedProxy) and _is_plain(arg.value) for arg in found)


def failed_line(error: Exception) -> str:
    """Quote the line of a model's code in which tracing failed; empty where it is not known."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.line and not frame.filename.startswith(_TRACERS):
            line = frame.line.strip()
            short = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
            return f"`{short}` ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
