"""SelectChannel on the GPU in Triton: a pass forward, a pass per derivative, no synchronisation.

Autograd sees one operation with a hand-written backward: no scatter, no atomics, deterministic.
Triton is not a dependency: it comes with torch's CUDA builds, and is imported when first asked for.
"""

# mypy: disable-error-code="name-defined"
# (`_kernels` defines the names that kernels use.)

import functools
import importlib
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from selectconv.checks import warn
from selectconv.core.kernels.kernel import Grads, Kernel, Operation, differentiable
from selectconv.core.shift import memory_format
from selectconv.core.shift import reroute as reroute_by_definition

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TILE = 1024  # elements that a program holds
_CHANNELS = 32  # of them, in channels last: neighbours in memory
_ELEMENTS_PER_WARP = 256
# Triton's own switch: kernels then run in Python, on tensors of the CPU too. For tests.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def can_run(x: Tensor) -> bool:
    """Return whether the Triton kernel serves an input: not float64, not three spatial axes."""
    return (
        (x.is_cuda or _IS_INTERPRETED)
        and x.dtype in _DTYPES
        and x.ndim in (3, 4)
        and find_obstacle(x.device) is None
    )


@functools.cache
def find_obstacle(device: torch.device) -> str | None:
    """Say why the kernel cannot serve a device; "": it is meant for others; None: it serves it.

    At the first question the kernel is compared with the definition, on a small input.
    """
    if device.type != "cuda" and not (_IS_INTERPRETED and device.type == "cpu"):
        return ""
    try:
        importlib.import_module("triton")
    except ImportError:
        return "triton is not installed"
    try:
        is_right = _equals_definition(device)
        obstacle = None if is_right else "the Triton kernel differs from the definition"
    except Exception as error:  # a compiler, a driver or a launch can fail in any way
        obstacle = f"triton cannot be used: {(str(error) or repr(error)).splitlines()[0]}"
    if obstacle is not None:
        warn(f"{obstacle}. On {device}, selective layers run on torch's operations instead.")
    return obstacle


@torch.inference_mode(False)
@torch.enable_grad()
def _equals_definition(device: torch.device) -> bool:
    x = torch.linspace(-1, 1, 40, device=device).view(1, 2, 4, 5)
    index = torch.tensor([0, 1, 1], device=device)
    shift = torch.tensor([[0.0, 0.0], [0.5, -1.25], [-2.0, 0.75]], device=device)
    shifted = torch.tensor([False, True, True], device=device)
    results = []
    for run in (reroute, reroute_by_definition):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, shift)]
        out = run(leaves[0], index, leaves[1], shifted)
        results.append([out, *torch.autograd.grad((out * out).sum(), leaves)])
    ours, theirs = results
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(ours, theirs, strict=True)
    )


def reroute(x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None) -> Tensor:
    """Compute `core.shift.reroute(x, index, shift, shifted)`, in float32."""
    if x.ndim == 3:  # a map of one row, which no shift leaves
        shift = None if shift is None else F.pad(shift, (1, 0))
        return reroute(x[:, :, None], index, shift, shifted).squeeze(2)
    if shift is None or shifted is None:
        shift = shifted = None
    else:
        shift, shifted = shift.contiguous(), shifted.contiguous()
    operation = Operation(_select, _differentiate, reroute_by_definition)
    return differentiable(operation, x, index.contiguous(), shift, shifted)


def _select(x: Tensor, index: Tensor, shift: Tensor | None, shifted: Tensor | None) -> Tensor:
    shape = (x.shape[0], len(index), *x.shape[2:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    _launch(_kernels().forward, out, (x, index, shift, shifted, out), x, out)
    return out


def _differentiate(
    grad: Tensor,
    needed: Sequence[bool],
    x: Tensor,
    index: Tensor,
    shift: Tensor | None,
    shifted: Tensor | None,
) -> Grads:
    grad_x = grad_shift = None
    if needed[0]:
        grad_x = torch.empty_like(x)
        read, readers = torch.sort(index, stable=True)
        first = torch.searchsorted(read, torch.arange(x.shape[1] + 1, device=x.device))
        tensors = (grad, readers, first, shift, shifted, grad_x)
        _launch(_kernels().backward_x, grad_x, tensors, grad, grad_x)
    if shift is not None and needed[2]:
        parts = torch.empty((len(x), *shift.shape), dtype=torch.float32, device=x.device)
        whole = (x, grad, index, shift, shifted, parts)
        _launch(_kernels().backward_shift, grad, whole, x, grad, whole_planes=True)
        grad_shift = parts.sum(0)
    return grad_x, None, grad_shift


def _launch(
    kernel: Any,
    tiled: Tensor,
    tensors: tuple[Tensor | None, ...],
    *strided: Tensor,
    whole_planes: bool = False,
) -> None:
    """Run a kernel over tiles of `tiled`: a pixel block of some channels of an image each."""
    images, channels, height, width = tiled.shape
    channel_block = 1
    if memory_format(tiled) == torch.channels_last:
        channel_block = min(_CHANNELS, _next_power(channels))
    pixel_block = min(_TILE // channel_block, _next_power(height * width))
    tiles = images * -(-channels // channel_block)
    if not whole_planes:
        tiles *= -(-(height * width) // pixel_block)
    if tiles == 0:
        return
    with torch.cuda.device_of(tiled):
        kernel[(tiles,)](
            *tensors,
            channels,
            height,
            width,
            *(step for tensor in strided for step in tensor.stride()),
            HAS_SHIFT=tensors[-3] is not None,  # before `shifted` and what is written
            PIXELS=pixel_block,
            CHANNELS=channel_block,
            num_warps=max(1, pixel_block * channel_block // _ELEMENTS_PER_WARP),
            enable_fp_fusion=False,  # the definition rounds products before it adds them
        )


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


@functools.cache
@no_type_check  # what is below is Triton's language, not Python's
def _kernels() -> SimpleNamespace:
    # Triton looks up the names in a kernel among the module's globals, not in this function.
    global tl, find_tile, split_offset, read_shift, tap, mix, shift_plane, store
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    # By default there is a compilation for each pattern of sizes divisible by 16. Nothing is gained
    # by it here, and layers differ: one for all takes a second or two.
    sizes = ["channels", "slots", "height", "width"]
    sizes += [f"{tensor}_{axis}" for tensor in ("x", "grad", "out") for axis in "nchw"]
    jit = functools.partial(triton.jit, do_not_specialize=sizes)

    @triton.jit
    def find_tile(channels, pixels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
        tile = tl.program_id(0)
        pixel_tiles, channel_tiles = tl.cdiv(pixels, PIXELS), tl.cdiv(channels, CHANNELS)
        pixel = tile % pixel_tiles * PIXELS + tl.arange(0, PIXELS)[:, None]
        channel = tile // pixel_tiles % channel_tiles * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        return (tile // pixel_tiles // channel_tiles).to(tl.int64), channel, pixel

    @triton.jit
    def split_offset(offset, size, is_shifted):
        b = tl.load(offset, mask=is_shifted, other=0.0).to(tl.float32)
        bound = size + 1.0  # from `size` on, the frame is empty
        b = tl.where(b > bound, bound, tl.where(b < -bound, -bound, b))
        whole = tl.floor(b)
        return tl.where(whole == whole, whole, 0.0).to(tl.int32), b - whole  # NaN: the fraction

    @triton.jit
    def read_shift(shift, shifted, slot, there, height, width, HAS_SHIFT: tl.constexpr):
        if HAS_SHIFT:
            is_shifted = tl.load(shifted + slot, mask=there, other=0) != 0
            down, far_down = split_offset(shift + slot * 2, height, is_shifted)
            right, far_right = split_offset(shift + slot * 2 + 1, width, is_shifted)
        else:
            is_shifted = there & (slot < 0)
            down, far_down, right, far_right = 0, 0.0, 0, 0.0
        return is_shifted, down, far_down, right, far_right

    @triton.jit
    def tap(plane, y, x, height, width, down_step, right_step, there):
        there = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = plane + y.to(tl.int64) * down_step + x.to(tl.int64) * right_step
        return tl.load(at, mask=there, other=0.0).to(tl.float32)

    @triton.jit
    def mix(near, far, fraction):
        return (1 - fraction) * near + fraction * far

    @triton.jit
    def shift_plane(
        plane, pixel, height, width, down_step, right_step, there,
        is_shifted, down, far_down, right, far_right, WAY: tl.constexpr,
    ):  # fmt: skip
        # WAY -1 is the transpose: a pixel gathers from those that read it.
        y, x = pixel // width + WAY * down, pixel % width + WAY * right
        value = tap(plane, y, x, height, width, down_step, right_step, there)
        if tl.max(is_shifted.to(tl.int32)) > 0:  # else it is a copy
            moves = there & is_shifted
            below = tap(plane, y + WAY, x, height, width, down_step, right_step, moves)
            beside = tap(plane, y, x + WAY, height, width, down_step, right_step, moves)
            across = tap(plane, y + WAY, x + WAY, height, width, down_step, right_step, moves)
            mixed = mix(mix(value, below, far_down), mix(beside, across, far_down), far_right)
            value = tl.where(is_shifted, mixed, value)
        return value

    @triton.jit
    def store(out, image, channel, pixel, width, n, c, h, w, value, there):
        plane = out + image * n + channel.to(tl.int64) * c
        at = plane + (pixel // width).to(tl.int64) * h + (pixel % width).to(tl.int64) * w
        tl.store(at, value.to(out.dtype.element_ty), mask=there)

    @jit
    def forward(
        x, index, shift, shifted, out, slots, height, width,
        x_n, x_c, x_h, x_w, out_n, out_c, out_h, out_w,
        HAS_SHIFT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        image, slot, pixel = find_tile(slots, height * width, PIXELS, CHANNELS)
        is_shifted, down, far_down, right, far_right = read_shift(
            shift, shifted, slot, slot < slots, height, width, HAS_SHIFT
        )
        plane = x + image * x_n + tl.load(index + slot, mask=slot < slots, other=0) * x_c
        there = (slot < slots) & (pixel < height * width)
        value = shift_plane(
            plane, pixel, height, width, x_h, x_w, there,
            is_shifted, down, far_down, right, far_right, 1,
        )  # fmt: skip
        store(out, image, slot, pixel, width, out_n, out_c, out_h, out_w, value, there)

    @jit
    def backward_x(
        grad, readers, first, shift, shifted, grad_x, channels, height, width,
        grad_n, grad_c, grad_h, grad_w, x_n, x_c, x_h, x_w,
        HAS_SHIFT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        image, channel, pixel = find_tile(channels, height * width, PIXELS, CHANNELS)
        there = (channel < channels) & (pixel < height * width)
        begin = tl.load(first + channel, mask=channel < channels, other=0)
        count = tl.load(first + channel + 1, mask=channel < channels, other=0) - begin
        total = tl.zeros([PIXELS, CHANNELS], tl.float32)
        for turn in range(0, tl.max(count)):
            is_read = turn < count
            slot = tl.load(readers + begin + turn, mask=is_read, other=0)
            is_shifted, down, far_down, right, far_right = read_shift(
                shift, shifted, slot, is_read, height, width, HAS_SHIFT
            )
            total += shift_plane(
                grad + image * grad_n + slot * grad_c, pixel, height, width, grad_h, grad_w,
                there & is_read, is_shifted, down, far_down, right, far_right, -1,
            )  # fmt: skip
        store(grad_x, image, channel, pixel, width, x_n, x_c, x_h, x_w, total, there)

    @jit
    def backward_shift(
        x, grad, index, shift, shifted, parts, slots, height, width,
        x_n, x_c, x_h, x_w, grad_n, grad_c, grad_h, grad_w,
        HAS_SHIFT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        image, slot, start = find_tile(slots, PIXELS, PIXELS, CHANNELS)
        is_shifted, down, far_down, right, far_right = read_shift(
            shift, shifted, slot, slot < slots, height, width, HAS_SHIFT
        )
        plane = x + image * x_n + tl.load(index + slot, mask=slot < slots, other=0) * x_c
        grad_plane = grad + image * grad_n + slot.to(tl.int64) * grad_c
        by_row = tl.zeros([PIXELS, CHANNELS], tl.float32)
        by_column = tl.zeros([PIXELS, CHANNELS], tl.float32)
        # Where no slot of the tile is shifted there is nothing to add up.
        for begin in range(0, tl.max(is_shifted.to(tl.int32)) * height * width, PIXELS):
            y, x_ = (begin + start) // width, (begin + start) % width
            g = tap(grad_plane, y, x_, height, width, grad_h, grad_w, is_shifted)
            y, x_ = y + down, x_ + right
            own = tap(plane, y, x_, height, width, x_h, x_w, is_shifted)
            below = tap(plane, y + 1, x_, height, width, x_h, x_w, is_shifted)
            beside = tap(plane, y, x_ + 1, height, width, x_h, x_w, is_shifted)
            across = tap(plane, y + 1, x_ + 1, height, width, x_h, x_w, is_shifted)
            by_row += g * mix(below - own, across - beside, far_right)
            by_column += g * (mix(beside, across, far_down) - mix(own, below, far_down))
        at = parts + (image * slots + slot) * 2
        tl.store(at, tl.sum(by_row, axis=0)[None, :], mask=slot < slots)
        tl.store(at + 1, tl.sum(by_column, axis=0)[None, :], mask=slot < slots)

    return SimpleNamespace(forward=forward, backward_x=backward_x, backward_shift=backward_shift)


KERNEL = Kernel(
    can_run=can_run,
    find_obstacle=find_obstacle,
    describe=lambda: "Triton kernel",
    reroute=reroute,
    # Reading the allocation would make the host wait for the GPU, layer by layer.
    reads_allocation=False,
)
