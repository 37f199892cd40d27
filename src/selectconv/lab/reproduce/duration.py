"""Estimate how long a grid takes, from a few timed steps of each of its networks."""

import subprocess
import sys
from collections.abc import Iterable

from selectconv.core.threads import using
from selectconv.deploy.cost import count_macs
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.train.estimate import count_images, seconds_per_image
from selectconv.lab.train.network import build_plain
from selectconv.lab.train.run_data import describe_data


def estimate_seconds(runs: Iterable[PlannedRun], threads: int) -> dict[str, float]:
    """Estimate each run's seconds, by name, from steps timed now; skip runs that cannot run.

    Each network is timed once with each method. For images of another size the time is scaled by
    the multiply-adds. CPU time is counted, as on idle cores, whatever else runs now.

    Args:
        runs: the planned runs.
        threads: of each run.
    """
    with using(threads):
        return _estimate(runs)


def _estimate(runs: Iterable[PlannedRun]) -> dict[str, float]:
    counted: dict[tuple[object, ...], int] = {}  # multiply-adds
    timed: dict[tuple[object, ...], float] = {}  # seconds per multiply-add
    estimates: dict[str, float] = {}
    start = _time_start()
    for run in runs:
        if run.problem is not None:
            continue
        config = run.config
        info = describe_data(config)
        network = (config.model, str(config.model_options))
        shaped, trained = (*network, info.shape), (*network, config.method)
        if shaped not in counted:
            counted[shaped] = count_macs(build_plain(config, info), info.shape)
        if trained not in timed:
            timed[trained] = seconds_per_image(config, info) / counted[shaped]
        seconds = timed[trained] * counted[shaped] * count_images(config, info)
        estimates[run.name] = start + seconds
    return estimates


def _time_start() -> float:
    """Time the start of a run: it is a process of its own, which imports torch first."""
    script = "import time, selectconv.lab.train.loop; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return float(done.stdout)
