"""Tracing with torch.fx: one tracer for any input, and one for the shapes of an example.

To torch.fx a value is unknown, so that it cannot decide `if x.shape[-1] > 16`. `ShapeTracer` knows
each value on the example: a tensor with a shape, but without data. What depends on the values of a
tensor is refused.
"""

import operator
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from selectconv.core.models import PARALLEL
from selectconv.errors import CompressionError
from selectconv.graph.operations import IN_PLACE_OPERATORS

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_TRACERS = tuple(f"{Path(home).parent}{os.sep}" for home in (torch.__file__, __file__))
_ON_VALUES = "what is computed depends on the values of a tensor"


class Proxy(fx.Proxy):
    """Records `x += y` and `x[i] = y` as writing into `x`: torch.fx takes the first for a sum."""


def _writing(target: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    def write(self: Proxy, *others: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, *others), {})

    return write


for _operator in (*IN_PLACE_OPERATORS, operator.setitem):
    setattr(Proxy, f"__{_operator.__name__}__", _writing(_operator))


class Tracer(fx.Tracer):
    """Traces into everything but torch's own modules and those that are to be seen as one step.

    Args:
        is_leaf: returns whether a module is one step of the graph.
        arguments: of the traced forward, by name. It decides by those that are None or of one of
            the `kinds`; to torch.fx all are unknown values: `if mask is None` would never hold.
        kinds: types of arguments.
    """

    proxy_class: type[Proxy] = Proxy

    def __init__(
        self,
        is_leaf: Callable[[nn.Module], bool],
        arguments: Mapping[str, Any],
        kinds: tuple[type, ...] = (bool, str),
    ) -> None:
        super().__init__()
        self.is_leaf = is_leaf
        self.settled = {
            name: value
            for name, value in arguments.items()
            if value is None or isinstance(value, kinds)
        }

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make the value that stands for a step while the model's code runs."""
        return self.proxy_class(node, self)

    def create_proxy(self, kind: str, target: Any, *rest: Any, **named: Any) -> Any:
        """Record a step and return the value that stands for it: a settled argument's own."""
        proxy = super().create_proxy(kind, target, *rest, **named)
        return self.settled[target] if kind == "placeholder" and target in self.settled else proxy

    def create_arg(self, a: Any) -> Any:
        """Turn a value into an argument of a step; torch.fx would make an ordered dict plain."""
        if type(a) is OrderedDict:
            return self.create_node("call_function", OrderedDict, (self.create_arg(dict(a)),), {})
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one step of the graph."""
        return self.is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a module; wrapped parts are traced as if they were not."""
        wrapped = m.module if isinstance(m, PARALLEL) else getattr(m, "_orig_mod", None)
        if wrapped is not None:
            return wrapped(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


class Fixed(IntEnum):
    """Which sizes of the example a traced graph is fixed to."""

    NONE = 0
    MAPS = 1  # all but that of the first axis: batches may still have any size
    ALL = 2


class DependsOnValues(fx.proxy.TraceError):
    """A forward depends on the values of a tensor."""


class _ShapedProxy(Proxy):
    """A proxy whose sizes are plain numbers, as far as its tracer fixes them."""

    tracer: "ShapeTracer"

    def __getattr__(self, k: str) -> Any:
        if self.tracer.fixed is Fixed.NONE:
            return super().__getattr__(k)
        value = self.node.meta["value"]
        if isinstance(value, Tensor) and k == "shape":
            return self.tracer.sizes(self)
        if callable(getattr(value, k)):
            return super().__getattr__(k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __len__(self) -> int:
        if isinstance(self.node.meta["value"], Tensor):
            return operator.index(self.shape[0])
        return len(self.tracer.plain(self))

    def __index__(self) -> int:
        return int(self.tracer.plain(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.tracer.plain(self))


class ShapeTracer(Tracer):
    """Traces a model on an example, of which it sees shapes but no values.

    Each node's `meta` holds the `value` that it has on the example, and its multiply-adds, `macs`.

    Args:
        is_leaf: as for `Tracer`.
        arguments: the example's, by the names that the model's forward gives them.
        fixed: which sizes are plain numbers to the model's code; the others are steps of the graph,
            which cannot decide anything.

    Attributes:
        fixed: becomes ALL where the forward needs the size of the batch.
    """

    proxy_class = _ShapedProxy

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], arguments: Mapping[str, Any], fixed: Fixed
    ) -> None:
        super().__init__(is_leaf, arguments, _PLAIN if fixed else (bool, str))
        self.fixed = fixed
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._counter = FlopCounterMode(display=False)
        self._arguments: Any = map_aggregate(
            dict(arguments),
            lambda value: self._mode.from_tensor(value) if isinstance(value, Tensor) else value,
        )
        self._is_running = False

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> fx.Node:
        """Record a step, and run it without data.

        Raises:
            CompressionError: it fails on the example.
        """
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        values = fx.map_arg((args, kwargs), lambda other: other.meta["value"])
        self._is_running = True
        try:
            with self._mode, torch.no_grad(), self._counter:
                node.meta["value"] = self._run(kind, target, *values)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DependsOnValues(_ON_VALUES) from error
        except Exception as error:
            raise CompressionError(
                f"`example_input`: the model fails on it with {error}"
            ) from error
        finally:
            self._is_running = False
        node.meta["macs"] = self._counter.get_total_flops() // 2
        return node

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            return self._arguments.get(str(target).lstrip("*"))
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if kind == "output":
            return None
        found = operator.attrgetter(str(target))(self.root)
        if kind == "get_attr":
            return found
        x = (*args, *kwargs.values())[0]
        # What a network has most of is not run as it is: that would be slow without data.
        if isinstance(found, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            own = found.weight
            weight = torch.empty(own.shape, dtype=own.dtype, device=own.device)
            return found._conv_forward(x, weight, None)
        is_norm = isinstance(found, _BatchNorm) and found.num_features == x.shape[1]
        return x if is_norm or isinstance(found, nn.ReLU) else found(*args, **kwargs)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        """Record a step; return a known plain result as it is."""
        if self.fixed and kind == "call_method" and target == "size":
            axes = (*args[1:], *kwargs.values())
            return self.sizes(args[0])[axes[0]] if axes else self.sizes(args[0])
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        if not self.fixed or not isinstance(proxy, fx.Proxy):
            return proxy
        value, read = proxy.node.meta["value"], proxy.node.all_input_nodes
        # What is made from a plain value of the graph depends on the size of the batch.
        is_known = not any(isinstance(other.meta["value"], _PLAIN) for other in read)
        return value if is_known and isinstance(value, _PLAIN) else proxy

    def sizes(self, proxy: fx.Proxy) -> tuple[Any, ...]:
        """Return a tensor's sizes: numbers, but for the first of what is not a parameter."""
        shape = tuple(proxy.node.meta["value"].shape)
        if not shape or self.fixed is Fixed.ALL or proxy.node.op == "get_attr":
            return shape
        return (super().create_proxy("call_method", "size", (proxy, 0), {}), *shape[1:])

    def plain(self, proxy: fx.Proxy) -> Any:
        """Return the value, not a tensor, that a proxy has on the example, to decide something."""
        value = proxy.node.meta["value"]
        if isinstance(value, Tensor):
            raise DependsOnValues(_ON_VALUES)
        if self.fixed is Fixed.NONE:
            raise fx.proxy.TraceError("a size decides what is computed")
        if isinstance(value, _PLAIN):  # of the graph: it depends on the size of the batch
            self.fixed = Fixed.ALL
        return value

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
        return bool(self.plain(obj))

    def iter(self, obj: Any) -> Iterator[Any]:
        """Go through the parts of a value."""
        if self.fixed is Fixed.NONE:
            return super().iter(obj)
        return (obj[place] for place in range(len(obj)))


def module_of(modules: Mapping[str, nn.Module], node: fx.Node) -> nn.Module | None:
    """Return which of the modules, by name, a node calls; None: it calls none."""
    return modules.get(str(node.target)) if node.op == "call_module" else None


def first_line(error: Exception) -> str:
    """Say in one line what user code raised under the tracer."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def failed_line(error: Exception) -> str:
    """Quote the line of a model's code in which tracing failed; empty where it is not known."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.line and not frame.filename.startswith(_TRACERS):
            line = frame.line.strip()
            short = line if len(line) <= 80 else f"{line[:80]}..."
            return f"`{short}` ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
