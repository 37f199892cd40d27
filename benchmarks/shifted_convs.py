"""Ways to write a conv with shifted slots, timed in ONNX Runtime: why `deploy/parts.py` joins.

    python benchmarks/shifted_convs.py [--batch-size 8] [--repeats 7]

Each way is a conv of which a fifth of the slots read a shifted channel, between 1x1 convs with
batch norm and ReLU, over the same with a plain conv: CPU time, one thread, in turn. `closed` is a
depthwise conv of which a fifth of the channels is gone, over the whole one. One JSON line per case.
"""

import argparse
import json
import math
from functools import partial

import torch
from torch import Tensor, nn

from selectconv.core.threads import num_threads
from selectconv.lab.bench.timing import compare, open_network

SHAPES = {  # inputs, outputs, kernel size, height and width
    "MobileNet, expanding": (16, 64, 1, 16),
    "MobileNet, projecting": (64, 16, 1, 16),
    "DenseNet": (128, 48, 1, 16),
    "ResNet": (64, 64, 3, 16),
}
STENCIL, SOURCES = 5, 3


class Shifted(nn.Module):
    """A conv with shifted slots; the weights are random, only the time counts."""

    def __init__(self, way: str, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.way, block = way, 1 if way == "joined, no blocks" else 8
        moved = math.ceil(round(inputs / 5) / block) * block
        read = SOURCES if way == "larger kernel, added" else moved
        self.index: Tensor
        self.register_buffer("index", torch.arange(read) % SOURCES)
        joined = inputs + moved if way.startswith("joined") else inputs
        self.conv = nn.Conv2d(joined, outputs, size, padding=size // 2, bias=False)
        self.stencil = nn.Conv2d(
            moved, moved, STENCIL, padding=STENCIL // 2, groups=moved, bias=False
        )
        kernel = STENCIL if way == "larger kernel, added" else size
        self.second = nn.Conv2d(read, outputs, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve what is shifted and what is not."""
        if self.way == "plain":
            y: Tensor = self.conv(x)
            return y
        shifted = torch.index_select(x, 1, self.index)
        if self.way != "larger kernel, added":
            shifted = self.stencil(shifted)
        if self.way.startswith("joined"):
            y = self.conv(torch.cat([x, shifted], 1))
            return y
        y = self.conv(x) + self.second(shifted)
        return y


WAYS = ("plain", "larger kernel, added", "stencil, added", "joined, no blocks", "joined")


def _norm_relu(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def between(inputs: int, outputs: int, *middle: nn.Module) -> nn.Module:
    """Put modules between 1x1 convs with batch norm and ReLU."""
    layers = [nn.Conv2d(16, inputs, 1, bias=False), *_norm_relu(inputs), *middle]
    last = nn.Conv2d(outputs, 16, 1, bias=False)
    return nn.Sequential(*layers, *_norm_relu(outputs), last, *_norm_relu(16)).eval()


def depthwise(channels: int) -> nn.Module:
    """Build a depthwise conv between others."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    return between(channels, channels, conv)


def _compare(about: str, models: dict[str, nn.Module], x: Tensor, repeats: int) -> None:
    sides = {
        name: partial(open_network(model, x, "onnxruntime"), x) for name, model in models.items()
    }
    for row in compare("shifted", about, sides, repeats)[1:]:
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    with num_threads(1):
        for about, (inputs, outputs, size, side) in SHAPES.items():
            x = torch.randn(options.batch_size, 16, side, side)
            models = {
                way: between(inputs, outputs, Shifted(way, inputs, outputs, size)) for way in WAYS
            }
            _compare(f"{about}, {inputs} to {outputs}, {size}x{size}", models, x, options.repeats)
        x = torch.randn(options.batch_size, 16, 16, 16)
        models = {f"{channels} channels": depthwise(channels) for channels in (64, 51, 56)}
        _compare("depthwise 3x3, closed", models, x, options.repeats)


if __name__ == "__main__":
    main()
