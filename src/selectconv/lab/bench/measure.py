"""The measurements of `selectconv bench step|alloc|data`."""

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.param_groups import param_groups
from selectconv.core.mean_source import ObservedMean
from selectconv.core.models import selective_layers
from selectconv.lab.bench.data import bench_data
from selectconv.lab.bench.interleave import in_turn, ratios, row
from selectconv.lab.bench.selective_cost import (
    Subject,
    build_network,
    draw_images,
    measure_growth,
    measure_memory,
    measure_selective,
)
from selectconv.lab.data.image_set import ImageSet
from selectconv.lab.data.registry import Splits, dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.evaluation import Batches
from selectconv.lab.train.loop import Training, build_fabric
from selectconv.lab.zoo import create_model

_BATCH = 64
_STEPS = 2  # a repeat: long enough to time, short enough to alternate often
_WEAK = 0.3


class Silent:
    """A display that shows nothing."""

    def batches(self, loader: Any, epoch: int, what: str) -> Batches:
        """Pass the batches through."""
        batches: Batches = loader.epoch(epoch)
        return batches

    def epoch_done(self, row: dict[str, Any], report: Any) -> None:
        """Show nothing."""


def measure_step(
    repeats: int, subject: Subject | None = None, *, compile: bool = False
) -> list[dict[str, Any]]:
    """Measure what selectivity costs a training step of a network.

    Without a `subject`, that of DenseNet-40, the trainer's speed, memory and single layers; with
    `compile` as well, the trainer's side alone, compiled.
    """
    if subject is not None:
        return measure_selective(repeats, subject, compile=compile)
    rows = measure_trainer(repeats, compile)
    if compile:
        return rows
    rows += measure_selective(repeats, Subject())
    return [*rows, *measure_memory(Subject()), *measure_growth(repeats)]


def measure_trainer(repeats: int, compile: bool) -> list[dict[str, Any]]:
    """Time DenseNet-40's training: `selectconv train --method plain` against a plain loop.

    The plain loop is what one writes first: eager, NCHW, the same network, optimizer and images,
    already augmented. The trainer's side includes its data pipeline.
    """
    torch.manual_seed(0)
    info = dataset_info("cifar10")
    images = torch.randint(256, (_BATCH * _STEPS, *info.shape), dtype=torch.uint8)
    labels = torch.randint(info.num_classes, (len(images),))
    splits = Splits(info, ImageSet(images, labels), ImageSet(images, labels))
    settings = {"method": "plain", "data": "cifar10", "device": "cpu", "batch_size": _BATCH}
    config = resolve({**settings, "compile": compile})
    training = Training(config, build_fabric(config), splits)

    model = create_model("densenet40")
    optimizer = torch.optim.SGD(
        param_groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    batches = list(training.train_loader.epoch(0))
    batches = [(images.contiguous(), labels) for images, labels in batches]

    def plain_loop() -> None:
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def trainer() -> None:
        training.train_epoch(0, Silent())

    command = "selectconv train --method plain" + (" --compile" if compile else "")
    plain, ours = in_turn({"plain": plain_loop, "trainer": trainer}, repeats).values()
    speedups = ratios(plain, ours)
    return [
        row("step", "trainer: plain eager NCHW loop", [t / _STEPS * 1e3 for t in plain], "ms"),
        row("step", f"trainer: {command}", [t / _STEPS * 1e3 for t in ours], "ms"),
        row("step", "trainer: speed over the plain loop", speedups, "x"),
    ]


def measure_alloc(
    repeats: int, model: str = "densenet_bc190", image_size: int = 32
) -> list[dict[str, Any]]:
    """Time one de- and re-allocation pass over a network with 30% weak slots."""
    network = build_network(model, "fresh", image_size)
    if any(
        isinstance(layer.mean_source, ObservedMean) for layer in selective_layers(network).values()
    ):
        with torch.no_grad():
            network(draw_images(Subject(model, image_size, batch_size=2), torch.contiguous_format))
    generator = torch.Generator().manual_seed(0)
    for layer in selective_layers(network).values():
        slots = torch.randperm(layer.in_channels, generator=generator)
        with torch.no_grad():
            layer.weight[:, slots[: int(_WEAK * layer.in_channels)]] *= 1e-9
    seconds = []
    for _ in range(repeats + 1):
        fresh = copy.deepcopy(network)
        optimizer = torch.optim.SGD(param_groups(fresh), lr=0.1, momentum=0.9, weight_decay=1e-4)
        for parameter in fresh.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        allocator = ChannelAllocator(fresh, optimizer, total_epochs=2, max_copies=None)
        started = time.process_time()
        report = allocator.step(0)
        seconds.append(time.process_time() - started)
    closed = sum(map(len, report.deallocated.values()))
    opened = sum(map(len, report.reallocated.values()))
    case = f"{model}, {closed} slots closed, {opened} re-opened"
    return [
        row("alloc", f"{case}: first call", seconds[:1], "s"),
        row("alloc", f"{case}: later calls", seconds[1:], "s"),
    ]


def measure_data(repeats: int) -> list[dict[str, Any]]:
    """Compare whole-batch augmentation on the device with the same through PIL, image by image."""
    result = bench_data(repeats=repeats)
    ratio = [result.ratio_min, result.ratio, result.ratio_max]
    return [
        row("data", "whole batches", [result.images_per_second], "images/s"),
        row("data", "image by image through PIL", [result.pil_images_per_second], "images/s"),
        {**row("data", "whole batches over PIL", ratio, "x"), "n": repeats},
    ]
