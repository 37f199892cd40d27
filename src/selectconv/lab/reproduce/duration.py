"""Estimate how long a grid takes, from a few timed steps of each of its networks."""

from collections.abc import Iterable

from selectconv.core.threads import num_threads
from selectconv.deploy.cost import count_macs
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.train.estimate import count_images, seconds_per_image
from selectconv.lab.train.network import build_model, build_plain

_START_S = 3.0  # each run is a process of its own, which imports torch first


def estimate_seconds(runs: Iterable[PlannedRun], threads: int) -> dict[str, float]:
    """Estimate each run's seconds, by name, from steps timed now.

    Each network is timed once with each method. For images of another size the time is scaled by
    the multiply-adds.

    Args:
        runs: the planned runs.
        threads: of each run.
    """
    macs: dict[tuple[object, ...], int] = {}
    rates: dict[tuple[object, ...], float] = {}  # seconds per multiply-add
    estimates: dict[str, float] = {}
    with num_threads(threads):
        for name, config in {run.name: run.config for run in runs}.items():
            info = dataset_info(config.data, config.image_size, config.data_root)
            network = (config.model, str(config.model_options))
            shaped, trained = (*network, info.shape), (*network, config.method)
            if shaped not in macs:
                macs[shaped] = count_macs(build_plain(config, info), info.shape)
            if trained not in rates:
                timed = seconds_per_image(build_model(config, info), config, info)
                rates[trained] = timed / macs[shaped]
            seconds = rates[trained] * macs[shaped] * count_images(config, info)
            estimates[name] = _START_S + seconds
    return estimates
