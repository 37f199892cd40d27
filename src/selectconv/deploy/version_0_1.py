"""Compressed files of version 0.1, read as plain graphs.

Version 0.1 wrote speed passes for eager mode into its files: 1x1 convs of a class `Pointwise2d`
that could add to a second argument, sums and ReLUs in place, and chains of concatenations that
filled one buffer. Each is rewritten here, in the description, as the plain operation that it
stands for.
"""

from typing import Any

_PLAIN_FUNCTIONS = {"torch.relu_": "torch.relu", "operator.iadd": "operator.add"}


def upgrade(description: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the description of a file of version 0.1; a plain one comes back as it is."""
    modules, pointwise = {}, set()
    for name, (kind, settings) in description["modules"].items():
        if kind == "Pointwise2d":
            pointwise.add(name)
        modules[name] = ["Conv2d" if kind == "Pointwise2d" else kind, settings]
    rewriter = _Rewriter(pointwise, description["steps"])
    for step in description["steps"]:
        rewriter.add(*step)
    return {**description, "modules": modules, "steps": rewriter.steps}


class _Rewriter:
    """Rewrites steps one by one; a step is [kind, name, target, args, kwargs] in plain data.

    Args:
        pointwise: names of the modules of class `Pointwise2d`.
        steps: all steps of the file.

    Attributes:
        steps: the plain steps so far.
    """

    def __init__(self, pointwise: set[str], steps: list[list[Any]]) -> None:
        self.pointwise = pointwise
        self.steps: list[list[Any]] = []
        # `new_empty` makes a buffer; `copy_` writes into parts of it, which `narrow` makes.
        self.places = {step[3][0]["node"]: "" for step in steps if step[2] == "copy_"}
        self.sizes = {
            name for step in steps if step[2] == "new_empty" for name in _names(step[3][1])
        }
        self.unread: dict[str, list[Any]] = {}  # by buffer, what was written since it was read
        self.joined: dict[str, Any] = {}  # by buffer, the concatenation that was read last

    def add(self, op: str, name: str, target: str, args: list[Any], kwargs: Any) -> None:
        """Add a step of the file."""
        if target == "new_empty":
            self.unread[name] = []
        elif name in self.places:
            self.places[name] = args[0]["node"]
        elif target == "copy_":
            self.unread[self.places[args[0]["node"]]].append(self._plain(args[1]))
        elif name not in self.sizes:
            args, kwargs = self._plain(args), self._plain(kwargs)
            if op == "call_module" and target in self.pointwise and len(args) == 2:
                self.steps.append([op, f"{name}_product", target, args[:1], kwargs])
                op, target = "call_function", "operator.add"
                args = [args[1], {"node": f"{name}_product"}]
            elif op == "call_function":
                target = _PLAIN_FUNCTIONS.get(target, target)
            self.steps.append([op, name, target, args, kwargs])

    def _plain(self, value: Any) -> Any:
        """Let arguments read concatenations in place of buffers."""
        if isinstance(value, list):
            return [self._plain(one) for one in value]
        if not isinstance(value, dict):
            return value
        if value.get("node") in self.unread:
            return self._read(value["node"])
        return {key: self._plain(one) for key, one in value.items()}

    def _read(self, buffer: str) -> Any:
        if self.unread[buffer]:
            before = [self.joined[buffer]] if buffer in self.joined else []
            name = f"{buffer}_joined_{len(self.steps)}"
            pieces = [before + self.unread[buffer], 1]
            self.steps.append(["call_function", name, "torch.cat", pieces, {"dict": {}}])
            self.joined[buffer] = {"node": name}
            self.unread[buffer] = []
        return self.joined[buffer]


def _names(value: Any) -> list[str]:
    """List the steps that a value reads."""
    if isinstance(value, list):
        return [name for one in value for name in _names(one)]
    if not isinstance(value, dict):
        return []
    return [value["node"]] if "node" in value else _names(list(value.values()))
