"""Timing that a noisy machine allows: sides in turn in one run, medians, ratios of neighbours."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from selectconv.core.kernels import describe_path


def in_turn(sides: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Time each side once a repeat, in turn, after a warm-up: seconds by side and repeat."""
    for side in sides:
        side()  # warm up
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, seconds in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - started)
    return times


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide what was measured in the same repeat."""
    return [a / b for a, b in zip(over, under, strict=True)]


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


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
