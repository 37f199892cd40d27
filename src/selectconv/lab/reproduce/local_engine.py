"""The engine for one machine: a few runs at a time, each in its own process."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.jobs import Outcome, conclude, start

_POLL_S = 0.2
_PATIENCE_S = 10  # for a run to end by itself


def threads_of(jobs: int) -> int:
    """Return the threads of each run when `jobs` runs share the cores."""
    return max(1, (os.cpu_count() or 1) // jobs)


def run_local(
    runs: Sequence[PlannedRun],
    out: Path,
    jobs: int,
    report: Callable[[Outcome], None],
) -> None:
    """Run them all, `jobs` at a time.

    Args:
        runs: what is left to do.
        out: folder of the grid.
        jobs: processes at a time; the cores are shared out among them.
        report: called with the outcome of each run.
    """
    threads = threads_of(jobs)
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
    waiting = list(runs)
    running: list[tuple[PlannedRun, subprocess.Popen[bytes]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running.append((run, start(run, out, environment)))
            time.sleep(_POLL_S)
            for run, process in list(running):
                if process.poll() is not None:
                    running.remove((run, process))
                    report(conclude(run, out, process.returncode))
    finally:
        _stop([process for _, process in running])


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt runs, which then say so and can be resumed; end those that do not listen."""
    for process in processes:
        if os.name == "posix":
            process.send_signal(signal.SIGINT)
        else:
            process.terminate()
    for process in processes:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
