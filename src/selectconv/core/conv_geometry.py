"""Which pixels a conv reads: index arithmetic on the CPU, for any number of spatial axes."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def read_places(
    conv: nn.modules.conv._ConvNd, size: Sequence[int], pixels: Tensor, offsets: Tensor
) -> Tensor:
    """Return which pixel of the input each position of the kernel reads, from shifted copies.

    A copy ends at the frame; the conv pads the copy.

    Args:
        conv: its kernel, stride, dilation and padding count.
        size: of the input's frame.
        pixels: (p, axes), pixels of the output.
        offsets: (F, axes), whole offsets of the copies.

    Returns:
        (t, p, F), for t positions of the kernel: pixels numbered row by row; -1 stands for zero.
    """
    taps = torch.tensor(list(itertools.product(*map(range, conv.kernel_size))))
    low = conv._reversed_padding_repeated_twice[-2::-2]
    stride, dilation = torch.tensor(conv.stride), torch.tensor(conv.dilation)
    read = pixels * stride - torch.tensor(low) + (taps * dilation)[:, None]  # t, p, axes
    frame = torch.tensor(list(size))
    if conv.padding_mode == "reflect":
        read = (frame - 1) - ((frame - 1) - read.abs()).abs()
    elif conv.padding_mode == "replicate":
        read = read.clamp(min=torch.zeros_like(frame), max=frame - 1)
    elif conv.padding_mode == "circular":
        read = read % frame
    source = read[:, :, None] + offsets  # t, p, F, axes
    is_inside = ((source >= 0) & (source < frame)).all(dim=-1)
    is_inside &= ((read >= 0) & (read < frame)).all(dim=-1)[..., None]
    return torch.where(is_inside, number_pixels(source, size), -1)


def number_pixels(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Number pixels (..., axes) of a frame row by row."""
    number = torch.zeros_like(pixels[..., 0])
    for axis, length in enumerate(size):
        number = number * length + pixels[..., axis]
    return number


def draw_pixels(size: Sequence[int], wanted: int, seed: int) -> Tensor:
    """Draw at most `wanted` different pixels of a frame: (p, axes)."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randperm(math.prod(size), generator=generator, device="cpu")[:wanted]
    return torch.stack(torch.unravel_index(number, list(size)), dim=1)
