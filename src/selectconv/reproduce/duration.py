"""Estimate how long a grid takes, from a few timed steps of each of its networks."""

import subprocess
import sys
import time
from collections.abc import Iterable

from selectconv.data.registry import dataset_info
from selectconv.deploy.cost import count_macs
from selectconv.reproduce.grid import PlannedRun
from selectconv.train.config import TrainConfig
from selectconv.train.estimate import seconds_per_image
from selectconv.train.network import build_plain

# Testing computes forward only, about a third of a training step.
_TEST_SHARE = 1 / 3


def estimate_seconds(runs: Iterable[PlannedRun]) -> dict[str, float]:
    """Estimate each run's seconds, by name, from steps timed now; skip runs that cannot run.

    Each network is timed once with each method. For images of another size the time is scaled by
    the multiply-adds.
    """
    timed: dict[tuple[str, str, str], float] = {}  # seconds per multiply-add
    estimates: dict[str, float] = {}
    start = _time_start()
    for run in runs:
        if run.problem is not None:
            continue
        config = run.config
        info = dataset_info(config.data, config.image_size)
        macs = count_macs(build_plain(config, info), info.shape)
        key = (config.model, str(config.model_options), config.method)
        if key not in timed:
            timed[key] = seconds_per_image(config, info) / macs
        estimates[run.name] = start + timed[key] * macs * _count_images(config)
    return estimates


def _time_start() -> float:
    """Time the start of a run: it is a process of its own, which imports torch first."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import selectconv.train.loop"], check=True)
    return time.perf_counter() - began


def _count_images(config: TrainConfig) -> float:
    info = dataset_info(config.data)
    train = config.subset or info.num_train
    test = config.test_subset or info.num_test
    return config.epochs * (train + _TEST_SHARE * test)
