"""The check of a tensor that a user passes in."""

import torch
from torch import Tensor

from selectconv.errors import BadType, BadValue


def check_tensor(
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    kind: torch.dtype | None = None,
    *,
    match: str = "",
) -> None:
    """Check a tensor's shape (None: any size) and dtype (None: any floating dtype).

    Args:
        name: of the argument.
        value: the tensor.
        shape: that it must have.
        kind: the dtype that it must have.
        match: the argument that the shape follows from; the error names it, too.
    """
    if not isinstance(value, Tensor):
        raise BadType(f"`{name}` must be a tensor, got {type(value).__name__}.")
    fits = value.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        reason = f" to match `{match}`" if match else ""
        raise BadValue(f"`{name}` must have shape ({wanted}){reason}, got {tuple(value.shape)}.")
    if kind is None and not value.is_floating_point():
        raise BadType(f"`{name}` must have a floating dtype, got {value.dtype}.")
    if kind is not None and value.dtype != kind:
        raise BadType(f"`{name}` must have dtype {kind}, got {value.dtype}.")
