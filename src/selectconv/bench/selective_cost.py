"""What selectivity costs: a selective network over the plain one, a layer over a plain conv."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.allocate.param_groups import param_groups
from selectconv.bench.interleave import in_turn, ratios, row
from selectconv.core.layer import SelectConv2d
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.models import selective_layers
from selectconv.data.registry import dataset_info
from selectconv.train.config import resolve
from selectconv.train.estimate import reallocate
from selectconv.train.network import build_model
from selectconv.zoo.blocks import NormReluConv

DEFAULT_MODEL = "densenet40"
_BATCH = 64
_IMAGE_SIZE = 32
_MOVED = "20% of the slots re-allocated"
_CLOSED = "50% of the slots closed"
_STATUS = Path("/proc/self/status")
_LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


def build_network(name: str, kind: str, image_size: int = _IMAGE_SIZE) -> nn.Module:
    """Build a network: "plain", "fresh", "moved" or "closed", all with the same weights.

    Args:
        name: as for `selectconv train --model`.
        kind: which slots of the layers that re-allocate were moved or closed.
        image_size: height and width of its images.
    """
    torch.manual_seed(0)
    method = "plain" if kind == "plain" else "select"
    config = resolve({"model": name, "method": method, "channels_last": False})
    info = dataset_info(config.data)
    model = build_model(config, replace(info, shape=(info.shape[0], image_size, image_size)))
    generator = torch.Generator().manual_seed(0)
    for layer in selective_layers(model).values():
        if layer.shift is None:
            continue
        if kind == "moved":
            reallocate(layer, 0.2, generator)
        elif kind == "closed":
            layer.close(torch.randperm(layer.in_channels, generator=generator)[::2])
    return model


def _step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(
        param_groups(model), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4
    )

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _evaluation(model: nn.Module, images: Tensor) -> Callable[[], object]:
    model.eval()

    def evaluate() -> None:
        with torch.no_grad():
            model(images)

    return evaluate


def measure_selective(
    repeats: int,
    training: bool = True,
    *,
    model: str = DEFAULT_MODEL,
    image_size: int = _IMAGE_SIZE,
) -> list[dict[str, Any]]:
    """Time the plain and the selective network in turn, in both layouts, eager."""
    name, what = ("step", "training step") if training else ("infer", "evaluation")
    rows = []
    for layout, memory_format in _LAYOUTS.items():
        torch.manual_seed(0)
        images = torch.randn(_BATCH, 3, image_size, image_size)
        images = images.contiguous(memory_format=memory_format)
        labels = torch.randint(10, (_BATCH,))
        sides = []
        for kind in ("plain", "fresh", "moved", "closed"):
            # nn.Module.to's overloads do not know memory_format.
            network = build_network(model, kind, image_size)
            network = network.to(memory_format=memory_format)  # type: ignore[call-overload]
            side = _step(network, images, labels) if training else _evaluation(network, images)
            sides.append(side)
        plain, fresh, moved, closed = in_turn(sides, repeats)
        about = f"{model}, {what}, {layout}"
        rows += [
            row(name, f"{about}: plain", [seconds * 1e3 for seconds in plain], "ms"),
            row(name, f"{about}: selective, fresh / plain", ratios(fresh, plain), "x"),
            row(name, f"{about}: {_MOVED} / plain", ratios(moved, plain), "x"),
            row(name, f"{about}: {_CLOSED} / plain", ratios(closed, plain), "x"),
        ]
    return rows


def measure_memory() -> list[dict[str, Any]]:
    """Compare the peak memory of a training step, each in a process of its own; Linux only."""
    if not _STATUS.exists():
        return []
    plain, moved = _peak_kib("plain"), _peak_kib("moved")
    return [
        row("step", "peak memory of a step: plain", [plain / 1024], "MiB"),
        row("step", f"peak memory of a step: {_MOVED} / plain", [moved / plain], "x"),
    ]


def _peak_kib(kind: str) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (kind,))


def _grow(kind: str) -> int:
    """How much memory this process has at most in two training steps, beyond what it had before."""
    step = _step(
        build_network(DEFAULT_MODEL, kind),
        torch.randn(_BATCH, 3, 32, 32),
        torch.arange(_BATCH) % 10,
    )
    before = _resident("VmRSS")
    step()
    step()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def measure_growth(repeats: int) -> list[dict[str, Any]]:
    """Time a 1x1 layer with 20% of its slots moved over a plain one, from 64 to 1024 inputs."""
    rows = []
    for channels in (64, 256, 1024):
        torch.manual_seed(0)
        norm, conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 48, 1, bias=False)
        layer = SelectConv2d(channels, 48, 1, bias=False)
        layer.mean_source = BatchNormMean(norm, torch.relu)
        reallocate(layer, 0.2, torch.Generator().manual_seed(0))
        x = torch.randn(16, channels, 16, 16, requires_grad=True)
        blocks = [_block(norm, conv), _block(norm, layer)]
        plain, lone, block, fused = in_turn(
            [_passes(module, x) for module in (conv, layer, *blocks)], 3 * repeats
        )
        about = f"{channels} inputs, 1x1, 20% moved"
        rows.append(row("step", f"{about}: layer / conv", ratios(lone, plain), "x"))
        rows.append(row("step", f"{about}: behind BN and ReLU / plain", ratios(fused, block), "x"))
    return rows


def _block(norm: nn.Module, conv: nn.Module) -> NormReluConv:
    block = NormReluConv()
    for name, module in (("norm", norm), ("relu", nn.ReLU(inplace=True)), ("conv", conv)):
        block.add_module(name, module)
    return block


def _passes(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward, often enough to time."""

    def run() -> None:
        for _ in range(4):
            module(x).sum().backward()
        x.grad = None

    return run
