"""How a model is run on an example: the arguments that stand for it, and evaluation mode."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode for a while."""
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags:
        module.training = False  # not .eval(): models override it
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def as_arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read an example as a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, tuple | list):
        return tuple(example_input), {}
    return (example_input,), {}
