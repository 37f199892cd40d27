"""How a model is run on an example: the arguments that stand for it, and evaluation mode."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from selectconv.errors import BadType, BadValue

# Types that cannot be a model's input.
_NO_TENSORS = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)


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
    """Read an example as a tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        TypeError: it cannot be one: there is no tensor in it.
        ValueError: its tensors are empty.
    """
    leaves = tree_leaves(example_input)
    keys = example_input if isinstance(example_input, Mapping) else ()
    if all(leaf is None or isinstance(leaf, _NO_TENSORS) for leaf in leaves) or not all(
        isinstance(key, str) for key in keys
    ):
        shown = " ".join(repr(example_input).split())
        raise BadType(
            "`example_input` must be a tensor, a tuple of arguments or a dict of keyword "
            f"arguments, got {shown:.60}; for an array give torch.from_numpy(array), for "
            "a shape torch.zeros(shape)."
        )
    sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
    if sizes and not any(sizes):
        raise BadValue("`example_input` is empty: give at least one example.")
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, tuple | list):
        return tuple(example_input), {}
    return (example_input,), {}
