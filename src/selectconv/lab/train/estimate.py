"""The plan of a run, printed before it starts: what it will do, and about how long it takes."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.core.allocation import draw_shift
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.core.threads import using
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import check_amounts, find_dataset
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.device import choose_device
from selectconv.lab.train.loop import build_optimizer
from selectconv.lab.train.network import build_model, build_plain, check_network
from selectconv.lab.train.run_data import describe_data
from selectconv.tables import counted

# Most multiply-adds of a timed forward pass: seconds even for the largest network.
_MOST_MACS = 5e9
_REPEATS = 5
_TEST_SHARE = 1 / 3  # testing computes forward only
# How many slots a training re-allocates: Section 3.3's fifth of what +S shifts.
_MOVED_SHARE = 0.2
_SOURCES = 8  # distinct channels that a layer's moved slots read
_MAX_SHIFT = 1.5


def announce(config: TrainConfig, folder: Path, console: Console) -> None:
    """Print a run's plan: network, data, steps, selection, and the time it will take."""
    device = choose_device(config)
    info = describe_data(config)
    is_missing = find_dataset(config.data, config.data_root) is None
    check_amounts(info, config.subset, config.test_subset, holdout=config.holdout)
    check_network(config, info)
    train_images = config.subset or info.num_train
    seconds = seconds_per_image(config, info) * count_images(config, info)
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))  # paths are shown whole
    parameters = count_params(build_model(config, info))
    images = "x".join(map(str, info.shape))
    table.add_row("network", f"{config.model}, {parameters:,} parameters")
    test_images = f"{config.test_subset or info.num_test:,} test images"
    if not info.num_test:
        test_images = "no test images: no error is measured"
    table.add_row("data", f"{config.data}, {train_images:,} training and {test_images}, {images}")
    if is_missing:
        table.add_row("", "not found on this machine: the run fetches it, or says what to do")
    table.add_row("method", describe_method(config))
    steps = -(-train_images // config.batch_size)
    table.add_row(
        "training",
        f"{counted(config.epochs, 'epoch')} of {counted(steps, 'step')} of "
        f"{counted(config.batch_size, 'image')}, lr {config.lr}",
    )
    threads = torch.get_num_threads()
    words = counted(threads, "thread")
    table.add_row("device", f"{device}, {config.precision}, {words}")
    table.add_row("folder", str(folder))
    table.add_row("takes", f"about {describe_duration(seconds)}")
    console.print(table, highlight=False)


def count_images(config: TrainConfig, info: DatasetInfo) -> float:
    """Count the images of a run; a test image counts as a fraction of a training image."""
    train = config.subset or info.num_train
    tested = config.epochs * (config.test_subset or info.num_test)
    if config.holdout:
        tested += info.num_train - train + info.num_test
    return config.epochs * train + _TEST_SHARE * tested


def describe_method(config: TrainConfig) -> str:
    """Describe what the method does to the channels."""
    part = f"the first {config.stop_at:.0%} of the epochs"
    goal = "gamma auto" if isinstance(config.gamma, str) else f"gamma {config.gamma:g}"
    if config.target_macs is not None:
        goal = f"to {config.target_macs:.1%} of the multiply-adds"
    elif config.target_params is not None:
        goal = f"to {config.target_params:.1%} of the parameters"
    words = config.method_info.words.format(goal=goal, part=part)
    return f"{config.method}: {words}"


def describe_duration(seconds: float) -> str:
    """Describe a duration in words."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1.5 else "a second"


def allocate_as_trained(model: nn.Module, config: TrainConfig) -> None:
    """Shift every slot (+S), or move a part of those that the method re-allocates."""
    method = config.method_info
    if method.shifts and not method.moves:
        ChannelAllocator(model, total_epochs=1, mode=method.name)
    if not method.moves:
        return
    generator = torch.Generator().manual_seed(0)
    for layer in selective_layers(model).values():
        if layer.shift is not None:
            reallocate(layer, _MOVED_SHARE, generator, use_shift=method.shifts)


def reallocate(
    layer: SelectConvNd, share: float, generator: torch.Generator, *, use_shift: bool = True
) -> None:
    """Move a share of a layer's slots to a few of the others, by random shifts."""
    order = torch.randperm(layer.in_channels, generator=generator)
    moved = order[: round(share * layer.in_channels)]
    sources = order[len(moved) : len(moved) + _SOURCES]
    chosen = torch.randint(len(sources), (len(moved),), generator=generator)
    shift = draw_shift(len(moved), layer.weight.ndim - 2, _MAX_SHIFT, generator)
    # R^random: with weights of zero, nothing would flow back through the moved slots.
    shifts = shift if use_shift else None
    plan = LayerPlan(moved, moved, sources[chosen], shifts, weight_seed=0)
    layer.apply_plan(plan)


def seconds_per_image(config: TrainConfig, info: DatasetInfo) -> float:
    """Time some training steps on random images with a network of its own.

    It is allocated as a training may leave it: moved slots take time that a fresh network does not.
    """
    device = choose_device(config)
    with torch.random.fork_rng():
        macs = count_macs(build_plain(config, info), info.shape)
        count = max(1, min(config.batch_size, int(_MOST_MACS / macs)))
        model = build_model(config, info)
        allocate_as_trained(model, config)
        model = model.to(device)
        optimizer = build_optimizer(config, model)
        images = torch.randn(count, *info.shape, device=device)
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(info.num_classes, (count,), device=device)

        def step() -> None:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return _time_step(step, device) / count


def _time_step(step: Callable[[], None], device: torch.device) -> float:
    """Time a step with all threads and, on the CPU, with one; return the shorter time.

    Threads that wait for each other on a busy machine count CPU time for nothing: several then
    seem slower than one.
    """
    threads = torch.get_num_threads()
    seconds = []
    for tried in {threads, 1} if device.type == "cpu" else {threads}:
        with using(tried):
            times = []
            for _ in range(_REPEATS + 1):
                started = _now(device)
                step()
                times.append(_now(device) - started)
        seconds.append(statistics.median(times[1:]))  # the first one warms up
    return min(seconds)


def _now(device: torch.device) -> float:
    """Return seconds that other programs on the machine do not stretch, where that is possible."""
    if device.type == "cpu":
        return time.process_time() / torch.get_num_threads()
    torch.accelerator.synchronize()
    return time.perf_counter()
