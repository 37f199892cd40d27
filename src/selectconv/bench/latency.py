"""How long models take: side by side, in turns, so that a busy machine slows them all alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def measure_latency(
    runs: Mapping[str, Callable[[], object]], repeats: int = 7, seconds: float = 0.05
) -> dict[str, list[float]]:
    """Measure the CPU time of one call of each, in seconds.

    After a warm-up the calls take turns; a turn repeats a call until about `seconds` have passed.

    Args:
        runs: what to call, by name.
        repeats: turns of each.
        seconds: CPU time of a turn, at least one call.

    Returns:
        By name, one measurement a turn.
    """
    loops = {}
    for name, run in runs.items():
        run()  # the first call allocates, packs weights and so on
        loops[name] = max(1, round(seconds / max(_time(run, 1), 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_time(run, loops[name]) / loops[name])
    return times


def median_ratio(times: list[float], base: list[float]) -> float:
    """Return the median of the ratios of two lists of measurements that took turns."""
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def _time(run: Callable[[], object], loops: int) -> float:
    start = time.process_time()
    for _ in range(loops):
        run()
    return time.process_time() - start
