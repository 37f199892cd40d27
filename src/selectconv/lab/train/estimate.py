"""The plan of a run, printed before it starts: what it will do, and about how long it takes."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.core.allocation import draw_offsets, draw_shift
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.core.threads import num_threads
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import check_amounts, dataset_info, find_dataset
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.device import choose_device
from selectconv.lab.train.loop import build_optimizer
from selectconv.lab.train.network import build_model, build_plain, check_network
from selectconv.tables import counted

_START_S = 3.0  # of a process, which imports torch first
_REPEATS = 3
_TEST_SHARE = 1 / 3  # testing computes forward only
# How many slots a training re-allocates: Section 3.3's fifth of what +S shifts.
_MOVED_SHARE = 0.2
_SOURCES = 8  # distinct channels that a layer's moved slots read
_MAX_SHIFT = 1.5


def announce(config: TrainConfig, folder: Path, console: Console) -> None:
    """Print a run's plan: network, data, steps, selection, and the time it will take."""
    device = choose_device(config)
    info = dataset_info(config.data, config.image_size, config.data_root)
    check_amounts(info, config.subset, config.test_subset, holdout=config.holdout)
    check_network(config, info)
    with torch.random.fork_rng():
        model = build_model(config, info)
    train_images = config.subset or info.num_train
    tested = (
        f"{config.test_subset or info.num_test:,} test images"
        if info.num_test
        else "no test images: no error is measured"
    )
    shape = "x".join(map(str, info.shape))
    if find_dataset(config.data, config.data_root) is None:
        shape += "; not found on this machine: the run fetches it, or says what to do"
    steps = counted(-(-train_images // config.batch_size), "step")
    batch = counted(config.batch_size, "image")
    parameters = count_params(model)  # before it is allocated, and timed
    seconds = seconds_per_image(model, config, info) * count_images(config, info)
    plan = {
        "network": f"{config.model}, {parameters:,} parameters",
        "data": f"{config.data}, {train_images:,} training and {tested}, {shape}",
        "method": describe_method(config),
        "training": f"{counted(config.epochs, 'epoch')} of {steps} of {batch}, lr {config.lr}",
        "device": f"{device}, {config.precision}, {counted(torch.get_num_threads(), 'thread')}",
        "folder": str(folder),
        "takes": f"about {describe_duration(seconds)}",
    }
    for name, words in plan.items():
        console.print(f"{name:10}{words}", highlight=False)


def count_images(config: TrainConfig, info: DatasetInfo) -> float:
    """Count the images of a run; a test image counts as a fraction of a training image."""
    train = config.subset or info.num_train
    tested = config.epochs * (config.test_subset or info.num_test)
    if config.holdout:
        tested += info.num_train - train + info.num_test
    return config.epochs * train + _TEST_SHARE * tested


def estimate_seconds(configs: Mapping[str, TrainConfig], threads: int) -> dict[str, float]:
    """Estimate each run's seconds, by name, from steps timed now.

    Each network is timed once with each method. For images of another size the time is scaled by
    the multiply-adds.

    Args:
        configs: the settings of each run.
        threads: of each run.
    """
    macs: dict[tuple[object, ...], int] = {}
    rates: dict[tuple[object, ...], float] = {}  # seconds per multiply-add
    estimates: dict[str, float] = {}
    with num_threads(threads):
        for name, config in configs.items():
            info = dataset_info(config.data, config.image_size, config.data_root)
            network = (config.model, str(config.model_options))
            shaped, trained = (*network, info.shape), (*network, config.method)
            if shaped not in macs:
                macs[shaped] = count_macs(build_plain(config, info), info.shape)
            if trained not in rates:
                rates[trained] = (
                    seconds_per_image(build_model(config, info), config, info) / macs[shaped]
                )
            estimates[name] = _START_S + rates[trained] * macs[shaped] * count_images(config, info)
    return estimates


def describe_method(config: TrainConfig) -> str:
    """Describe what the method does to the channels."""
    part = f"the first {config.stop_at:.0%} of the epochs"
    goal = "gamma auto" if isinstance(config.gamma, str) else f"gamma {config.gamma:g}"
    if config.target_macs is not None:
        goal = f"to {config.target_macs:.1%} of the multiply-adds"
    elif config.target_params is not None:
        goal = f"to {config.target_params:.1%} of the parameters"
    words = config.method_info.words.format(goal=goal, part=part)
    if config.shifts == "whole":
        words = words.replace("with shifts", "with shifts by whole pixels")
    return f"{config.method}: {words}"


def describe_duration(seconds: float) -> str:
    """Describe a duration in words."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1.5 else "a second"


def seconds_per_image(model: nn.Module, config: TrainConfig, info: DatasetInfo) -> float:
    """Time some training steps of a new network, which is of no more use, on random images.

    It is allocated as a training may leave it: moved slots take time that a fresh network does not.
    """
    device = choose_device(config)
    method = config.method_info
    with torch.random.fork_rng():
        if method.moves:
            generator = torch.Generator().manual_seed(0)
            for layer in selective_layers(model).values():
                if layer.shift is not None:
                    reallocate(
                        layer, _MOVED_SHARE, generator, config.shifts if method.shifts else None
                    )
        elif method.shifts:
            ChannelAllocator(model, total_epochs=1, mode=method.name)
        model = model.to(device)
        optimizer = build_optimizer(config, model)

        def time_step(count: int) -> float:
            images = torch.randn(count, *info.shape, device=device)
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.randint(info.num_classes, (count,), device=device)
            started = time.perf_counter()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            return time.perf_counter() - started

        # As many images as take about half a second; the first steps warm up, or meet other work.
        few = min(2, config.batch_size)
        quick = min(time_step(few) for _ in range(6))
        count = max(few, min(config.batch_size, int(few * 0.5 / quick)))
        return min(time_step(count) for _ in range(_REPEATS)) / count


def reallocate(
    layer: SelectConvNd, share: float, generator: torch.Generator, shifts: str | None = "learned"
) -> None:
    """Move a share of a layer's slots to a few of the others, by random shifts or by none."""
    order = torch.randperm(layer.in_channels, generator=generator)
    moved = order[: round(share * layer.in_channels)]
    sources = order[len(moved) : len(moved) + _SOURCES]
    chosen = torch.randint(len(sources), (len(moved),), generator=generator)
    axes, shift = layer.weight.ndim - 2, None
    if shifts == "learned":
        shift = draw_shift(len(moved), axes, _MAX_SHIFT, generator)
    elif shifts == "whole":
        shift = draw_offsets(sources[chosen], sources, torch.zeros(len(sources), axes), generator)
    # R^random: with weights of zero, nothing would flow back through the moved slots.
    layer.apply_plan(LayerPlan(moved, moved, sources[chosen], shift, weight_seed=0))
