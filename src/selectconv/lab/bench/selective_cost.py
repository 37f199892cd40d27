"""What selectivity costs: a selective network over the plain one, a layer over a plain conv."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.allocate.param_groups import param_groups
from selectconv.core.layer import SelectConv2d
from selectconv.core.mean_source import BatchNormMean
from selectconv.core.models import selective_layers
from selectconv.lab.bench.interleave import in_turn, ratios, row
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.estimate import reallocate
from selectconv.lab.train.network import build_model, check_network
from selectconv.lab.zoo.blocks import NormReluConv

# What was done to the layers that re-allocate.
KINDS = {
    "plain": "plain",
    "fresh": "selective, fresh",
    "moved": "20% of the slots re-allocated",
    "closed": "50% of the slots closed",
}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        model: a network, named as for `selectconv train --model`.
        image_size: height and width of its images.
        batch_size: images of a call.
    """

    model: str = "densenet40"
    image_size: int = 32
    batch_size: int = 64


def draw_images(subject: Subject, memory_format: torch.memory_format) -> Tensor:
    """Draw a batch of images."""
    generator = torch.Generator().manual_seed(0)
    side = subject.image_size
    images = torch.randn(subject.batch_size, 3, side, side, generator=generator)
    return images.contiguous(memory_format=memory_format)


def build_network(name: str, kind: str, image_size: int = 32) -> nn.Module:
    """Build a network: "plain", "fresh", "moved" or "closed", all with the same weights.

    Args:
        name: as for `selectconv train --model`.
        kind: one of `KINDS`: which slots of the layers that re-allocate were moved or closed.
        image_size: height and width of its images.
    """
    torch.manual_seed(0)
    method = "plain" if kind == "plain" else "select"
    config = resolve({"model": name, "method": method, "channels_last": False})
    info = dataset_info(config.data)
    info = replace(info, shape=(info.shape[0], image_size, image_size))
    if kind == "plain":
        check_network(config, info)
    model = build_model(config, info)
    generator = torch.Generator().manual_seed(0)
    for layer in selective_layers(model).values():
        if layer.shift is None:
            continue
        if kind == "moved":
            reallocate(layer, 0.2, generator)
        elif kind == "closed":
            layer.close(torch.randperm(layer.in_channels, generator=generator)[::2])
    return model


def _step(
    model: nn.Module, images: Tensor, labels: Tensor, *, compile: bool = False
) -> Callable[[], object]:
    optimizer = torch.optim.SGD(
        param_groups(model), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4
    )

    run = torch.compile(model) if compile else model

    def step() -> None:
        loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure_selective(
    repeats: int, subject: Subject, *, compile: bool = False
) -> list[dict[str, Any]]:
    """Time a training step of the plain and the selective network in turn, in both layouts.

    With `compile`, both go through torch.compile, in NCHW alone: compiling takes minutes.
    """
    model, image_size = subject.model, subject.image_size
    rows = []
    for layout, memory_format in LAYOUTS.items():
        if compile and layout != "NCHW":
            continue
        images = draw_images(subject, memory_format)
        labels = torch.arange(len(images)) % 10
        sides = {}
        for kind in KINDS:
            # nn.Module.to's overloads do not know memory_format.
            network = build_network(model, kind, image_size)
            network = network.to(memory_format=memory_format)  # type: ignore[call-overload]
            sides[kind] = _step(network, images, labels, compile=compile)
        times = in_turn(sides, repeats)
        about = f"{model}, {'compiled ' if compile else ''}training step, {layout}"
        milliseconds = [seconds * 1e3 for seconds in times["plain"]]
        rows.append(row("step", f"{about}: plain", milliseconds, "ms"))
        for kind, words in KINDS.items():
            if kind != "plain":
                over = ratios(times[kind], times["plain"])
                rows.append(row("step", f"{about}: {words} / plain", over, "x"))
    return rows


def measure_memory(subject: Subject) -> list[dict[str, Any]]:
    """Compare the peak memory of a training step, each in a process of its own."""
    plain, moved = _peak(subject, "plain"), _peak(subject, "moved")
    if plain is None or moved is None:
        return []
    return [
        row("step", "peak memory of a step: plain", [plain / 1024], "MiB"),
        row("step", f"peak memory of a step: {KINDS['moved']} / plain", [moved / plain], "x"),
    ]


def _peak(subject: Subject, kind: str) -> int | None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (subject, kind))


def _grow(subject: Subject, kind: str) -> int | None:
    images = draw_images(subject, torch.contiguous_format)
    network = build_network(subject.model, kind, subject.image_size)
    step = _step(network, images, torch.arange(len(images)) % 10)
    return peak_memory(lambda: [step(), step()])


def peak_memory(work: Callable[[], object]) -> int | None:
    """Measure how much memory work takes at most, in KiB, beyond what this process had before.

    Only the first measurement of a process is right. None: the system, if not Linux, does not tell.
    """
    if not _STATUS.exists():
        return None
    before = _resident("VmRSS")
    work()
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
        modules = {
            "conv": conv,
            "layer": layer,
            "block": _block(norm, conv),
            "fused": _block(norm, layer),
        }
        sides = {name: _passes(module, x) for name, module in modules.items()}
        times = in_turn(sides, 3 * repeats)
        about = f"{channels} inputs, 1x1, 20% moved"
        lone, fused = ratios(times["layer"], times["conv"]), ratios(times["fused"], times["block"])
        rows.append(row("step", f"{about}: layer / conv", lone, "x"))
        rows.append(row("step", f"{about}: behind BN and ReLU / plain", fused, "x"))
    return rows


def _block(norm: nn.Module, conv: nn.Module) -> NormReluConv:
    block = NormReluConv()
    for name, module in (("norm", norm), ("relu", nn.ReLU(inplace=True)), ("conv", conv)):
        block.add_module(name, module)
    return block


def _passes(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward."""

    def run() -> None:
        module(x).sum().backward()
        x.grad = None

    return run
