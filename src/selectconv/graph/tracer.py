"""The tracer of conversion, counting and compression: torch.fx's, which also sees writes."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from selectconv.core.models import inner_module
from selectconv.graph.operations import IN_PLACE_OPERATORS


class Proxy(fx.Proxy):
    """Records `x += y` and `x[i] = y` as writing into `x`: torch.fx takes the first for a sum."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _writing(target: Callable[..., Any]) -> Callable[[Proxy, Any], fx.Proxy]:
    def write(self: Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return write


for _operator in IN_PLACE_OPERATORS:
    setattr(Proxy, f"__{_operator.__name__}__", _writing(_operator))


class Tracer(fx.Tracer):
    """Traces into everything but torch's own modules and those that are to be seen as one step.

    Args:
        is_leaf: returns whether a module is one step of the graph.
        settled: arguments of the traced forward that have one value, by name.

    Attributes:
        inside: names of the modules whose forward is under way, outermost first. After an exception
            they say where it was raised.
    """

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], settled: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.is_leaf = is_leaf
        self.settled = settled or {}
        self.inside: list[str] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make the value that stands for a step while the model's code runs."""
        return Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, *rest: Any, **named: Any) -> Any:
        """Record a step and return the value that stands for it: a settled argument's own."""
        proxy = super().create_proxy(kind, target, *rest, **named)
        return self.settled[target] if kind == "placeholder" and target in self.settled else proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one step of the graph."""
        return self.is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a module; wrapped parts are traced as if they were not."""
        if (wrapped := inner_module(m)) is not None:
            return wrapped(*args, **kwargs)
        self.inside.append(self.path_of_module(m))
        out = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return out


def module_of(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls; None: it calls none."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def first_line(error: Exception) -> str:
    """Say in one line what user code raised under the tracer."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
