"""What growth by gradient costs: training steps that are watched over steps that are not."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.param_groups import param_groups
from selectconv.core.gradients import PASSES
from selectconv.lab.bench.interleave import in_turn, ratios, row
from selectconv.lab.bench.selective_cost import Subject, build_network, draw_images, peak_memory

_EPOCH = 782  # steps of an epoch of CIFAR's 50,000 images in batches of 64
_GROWTHS = ("importance", "gradient")


def measure_watching(repeats: int, subject: Subject) -> list[dict[str, Any]]:
    """Time steps in which all layers are watched against those of the paper's rule.

    An epoch watches `PASSES` passes, however long it is; its ratio is computed from that.
    """
    sides = {growth: _step(subject, growth, watch_all=True) for growth in _GROWTHS}
    times = in_turn(sides, repeats)
    once = ratios(times["gradient"], times["importance"])
    epoch = [1 + (ratio - 1) * PASSES / _EPOCH for ratio in once]
    about = f"{subject.model}, growth by gradient"
    milliseconds = [seconds * 1e3 for seconds in times["importance"]]
    rows = [
        row("growth", f"{about}: a step of the paper's rule", milliseconds, "ms"),
        row("growth", f"{about}: a step with all layers watched / the paper's rule", once, "x"),
        row("growth", f"{about}: an epoch of {_EPOCH} steps / the paper's rule", epoch, "x"),
    ]
    peaks = [[_peak(subject, growth) for growth in _GROWTHS] for _ in range(repeats)]
    memory = [ours / paper for paper, ours in peaks if paper is not None and ours is not None]
    if memory:
        words = "peak memory, layers watched in turn / the paper's rule"
        rows.append(row("growth", f"{about}: {words}", memory, "x"))
    return rows


def _step(subject: Subject, growth: str, *, watch_all: bool = False) -> Callable[[], object]:
    """Return a training step of a network of which 20% of the slots were moved."""
    network = build_network(subject.model, "moved", subject.image_size)
    optimizer = torch.optim.SGD(param_groups(network), lr=0.01, momentum=0.9, weight_decay=1e-4)
    allocator = ChannelAllocator(network, optimizer, total_epochs=2, growth=growth)
    for layer in allocator.layers.values():
        if watch_all and layer.statistics is not None:
            layer.statistics.schedule.every = 1
    images = draw_images(subject, torch.contiguous_format)
    labels = torch.arange(len(images)) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def _peak(subject: Subject, growth: str) -> int | None:
    """Measure the memory of steps in which the layers are watched in turn, in a process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (subject, growth))


def _grow(subject: Subject, growth: str) -> int | None:
    step = _step(subject, growth)
    return peak_memory(lambda: [step() for _ in range(6)])
