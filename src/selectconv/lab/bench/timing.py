"""Timing that a busy machine allows: CPU time, sides in turn in one run, ratios of neighbours."""

import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.core.kernels import describe_path
from selectconv.deploy.onnx import export_onnx, open_session

Side = Callable[[], object]
Rows = list[dict[str, Any]]


def in_turn(
    sides: Mapping[str, Side], repeats: int, seconds: float = 0.05
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
            times[name].append(_time(side, loops[name]))
    return times


def _time(side: Side, loops: int) -> float:
    start = time.process_time()
    for _ in range(loops):
        side()
    return (time.process_time() - start) / loops


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide what was measured in the same turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def row(name: str, case: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Make a line of a benchmark's result: median and spread, and where it was measured."""
    value, *spread = (
        float(f"{number:.4g}") for number in (statistics.median(values), min(values), max(values))
    )
    return {
        "name": name,
        "case": case,
        "value": value,
        "unit": unit,
        "n": len(values),
        "spread": spread,
        "path": describe_path(torch.device("cpu")),
        "torch": torch.__version__,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def compare(name: str, about: str, sides: Mapping[str, Side], repeats: int) -> Rows:
    """Time sides in turn; returns a line for the first one, and each other's ratio to it."""
    first, *others = sides
    times = in_turn(sides, repeats)
    return [
        row(name, f"{about}: {first}", [seconds * 1e3 for seconds in times[first]], "ms"),
        *(
            row(name, f"{about}: {other} / {first}", ratios(times[other], times[first]), "x")
            for other in others
        ),
    ]


def open_network(network: nn.Module, example: Tensor, runtime: str) -> Callable[[Tensor], object]:
    """Return what runs a network: itself ("eager"), compiled, or a session of "onnxruntime"."""
    if runtime != "onnxruntime":
        return torch.compile(network) if runtime == "compile" else network
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export_onnx(network, file, example)
        return open_session(file)
