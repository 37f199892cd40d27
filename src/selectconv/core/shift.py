"""Section 2.2: the sub-pixel spatial shift, and SelectChannel, which rebuilds a conv's input.

`shift2d` is the paper's formula. It is separable, so it is computed an axis at a time: along one
axis, `out[y] = (1 - f) * x[y + n] + f * x[y + n + 1]` with `n = floor(b)` and `f = b - n`.
"""

import torch
from torch import Tensor

from selectconv.core.tensors import check_tensor
from selectconv.errors import BadValue


def shift2d(x: Tensor, b: Tensor) -> Tensor:
    """Shift each channel by its own offset in pixels, bilinearly (Section 2.2).

    `out[n, c, y, x] = sum_pq x[n, c, p, q] * max(0, 1 - |y - p + bh|) * max(0, 1 - |x - q + bw|)`:
    the output at a pixel reads the input at that pixel plus `b`; outside the frame, it reads zeros.
    Differentiable in both arguments; at whole pixels, the derivative in `b` is the right-hand one.

    Args:
        x: (N, C, H, W), any floating dtype and memory format; never written into.
        b: (C, 2), the offsets (b^h, b^w) in pixels, of any size.

    Returns:
        (N, C, H, W) with the dtype and the memory format of `x`.

    Raises:
        TypeError, ValueError: `x` or `b` has the wrong dtype or shape.

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> shift2d(x, torch.tensor([[0.0, 0.5]]))
        tensor([[[[0.5000, 0.5000],
                  [2.5000, 1.5000]]]])
    """
    check_tensor("x", x, (None, None, None, None))
    check_tensor("b", b, (x.shape[1], 2), match="x")
    return shift_channels(x, b)


def select_channels(
    x: Tensor, gate: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None
) -> Tensor:
    """Select an input's channels: `g_i * shift(x[index_i], b_i)` (SelectChannel, Section 2.2).

    Args:
        x: (N, C, ...) with one to three spatial axes; never written into.
        gate: (I,) bool, g: the open slots. The result is zero for the others.
        index: (I,) int64, pi: the channel that each slot reads.
        shift: (I, number of spatial axes), b in pixels. None: nothing is shifted.
        shifted: (I,) bool: the slots that read with a shift; the others read the channel as it is.

    Returns:
        (N, I, ...) with the dtype and the memory format of `x`.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape or range.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
        >>> gate, index = torch.tensor([False, True]), torch.tensor([0, 0])
        >>> shift, shifted = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([False, True])
        >>> select_channels(x, gate, index, shift, shifted)
        tensor([[[[0., 0.]],
        <BLANKLINE>
                 [[2., 0.]]]])
    """
    check_tensor("x", x, (None,) * getattr(x, "ndim", 0))
    if x.ndim not in (3, 4, 5):
        raise BadValue(f"`x` must be (N, C) and one to three spatial axes, got {tuple(x.shape)}.")
    check_tensor("index", index, (None,), torch.int64)
    slots = len(index)
    check_tensor("gate", gate, (slots,), torch.bool, match="index")
    if (shift is None) != (shifted is None):
        raise BadValue("`shift` and `shifted` go together: pass both, or None for both.")
    if shift is not None and shifted is not None:
        check_tensor("shift", shift, (slots, x.ndim - 2), match="index` and `x")
        check_tensor("shifted", shifted, (slots,), torch.bool, match="index")
    if slots and is_readable(index):
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= x.shape[1]:
            raise BadValue(
                f"`index` must name channels 0 to {x.shape[1] - 1} of `x`, got {low} to {high}."
            )
    return mask_channels(reroute(x, index, shift, shifted), gate)


def mask_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` (N, I, ...) with zeros where `gate` (I,) is closed."""
    # torch.where keeps the memory format; masked_fill makes its copy contiguous.
    return torch.where(gate.view(1, -1, *[1] * (x.ndim - 2)), x, 0.0)


def reroute(x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None) -> Tensor:
    """SelectChannel without the gate and without checks: `shift(x[index_i], b_i)`."""
    taken = _take_channels(x, index)
    if shift is None or shifted is None:
        return taken
    if not is_near(shifted):
        # One graph for every allocation: what is not shifted is shifted by zero, the identity.
        return shift_channels(taken, torch.where(shifted[:, None], shift, 0.0))
    slots = shifted.nonzero().flatten()
    if len(slots) == 0:
        return taken
    moved = shift_channels(_take_channels(taken, slots), shift.index_select(0, slots))
    # `taken` is a copy of our own; out of place, index_copy would make its copy contiguous.
    return taken.index_copy_(1, slots, moved)


def is_readable(tensor: Tensor) -> bool:
    """Return whether Python can read a tensor's values.

    It cannot under torch.compile and torch.func, nor those of meta, fake and subclassed tensors.
    """
    return not (
        torch.compiler.is_compiling()
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
    )


def is_near(tensor: Tensor) -> bool:
    """Return whether Python can read a tensor's values without waiting for a device."""
    return tensor.is_cpu and is_readable(tensor)


def shift_channels(x: Tensor, b: Tensor) -> Tensor:
    """`shift2d` for any number of spatial axes: `x` (N, C, ...), `b` (C, axes); no checks."""
    # Offsets need their fraction: bfloat16 keeps 8 bits, so it is widened before anything else.
    # With a float64 `x`, 1 - fraction in float32 would cost it half of its digits.
    exact = torch.promote_types(torch.promote_types(x.dtype, b.dtype), torch.float32)
    offset = b.to(exact)
    out = x
    for axis in range(x.ndim - 2):
        out = _shift_axis(out, offset[:, axis], axis + 2)
    return out.to(x.dtype).contiguous(memory_format=memory_format(x))


def _shift_axis(x: Tensor, b: Tensor, dim: int) -> Tensor:
    size = x.shape[dim]
    if size == 0:
        return x
    b = b.clamp(-size - 1, size + 1)  # from `size` on, the frame is empty; keeps the integers small
    whole = b.detach().floor()
    fraction = b - whole  # in [0, 1): its derivative in b is 1, the right-hand one at whole pixels
    steps = torch.arange(size + 1, device=x.device)
    position = whole.to(torch.int64)[:, None] + steps  # (C, size + 1)
    outside = (position < 0) | (position >= size)

    along = [1] * x.ndim
    along[1], along[dim] = len(b), size + 1
    shape = list(x.shape)
    shape[dim] = size + 1
    taps = x.gather(dim, position.clamp(0, size - 1).view(along).expand(shape))
    taps = taps.masked_fill(outside.view(along), 0.0)

    near, far = taps.narrow(dim, 0, size), taps.narrow(dim, 1, size)
    fraction = fraction.view([-1 if axis == 1 else 1 for axis in range(x.ndim)])
    return (1 - fraction) * near + fraction * far


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the channels-last format if `x` (N, C, ...) has that and is not contiguous as well."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _take_channels(x: Tensor, index: Tensor) -> Tensor:
    # index_select writes in the order it is asked for: channels last in, channels last out.
    if memory_format(x) is not torch.contiguous_format:
        return x.movedim(1, -1).index_select(-1, index).movedim(-1, 1)
    return x.index_select(1, index)
