"""Timing that a busy machine allows: CPU time, sides in turn in one run, ratios of neighbours."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from selectconv.core.kernels import describe_path


def in_turn(
    sides: Mapping[str, Callable[[], object]], repeats: int, seconds: float = 0.05
) -> dict[str, list[float]]:
    """Measure the CPU time of one call of each side, in seconds.

    After a warm-up the sides take turns; a turn repeats a call until about `seconds` have passed.

    Args:
        sides: what to call, by name.
        repeats: turns of each.
        seconds: CPU time of a turn, at least one call.

    Returns:
        By name, one measurement per turn.
    """
    loops = {}
    for name, side in sides.items():
        side()  # the first call allocates, packs weights and so on
        loops[name] = max(1, round(seconds / max(_time(side, 1), 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(_time(side, loops[name]) / loops[name])
    return times


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide what was measured in the same turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of what was measured in the same turn."""
    return statistics.median(ratios(over, under))


def row(name: str, case: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Make a line of a benchmark's result: median and spread, and where it was measured."""
    return {
        "name": name,
        "case": case,
        "value": _digits(statistics.median(values)),
        "unit": unit,
        "n": len(values),
        "spread": [_digits(min(values)), _digits(max(values))],
        "path": describe_path(torch.device("cpu")),
        "torch": torch.__version__,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def _time(run: Callable[[], object], loops: int) -> float:
    start = time.process_time()
    for _ in range(loops):
        run()
    return time.process_time() - start


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
