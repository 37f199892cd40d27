"""How far the runs of a grid are, and how long the rest takes, from their own folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selectconv.errors import RunError
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.jobs import RUNS
from selectconv.lab.train.run_folder import METRICS, RunFolder


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        name: of the run.
        epochs: how many it has in all.
        done: how many of them are done.
        seconds: what those took.
        error: test error after the last of them, in per cent; None: not known.
    """

    name: str
    epochs: int
    done: int = 0
    seconds: float = 0.0
    error: float | None = None


def read_progress(run: PlannedRun, out: Path) -> RunProgress:
    """Read how far a run is from its lines of metrics; a file that cannot be read tells nothing."""
    try:
        rows = RunFolder(out / RUNS / run.name).read(METRICS)
        seconds = sum(float(row["seconds"]) for row in rows)
        error = rows[-1]["test_error"] if rows else None
    except (RunError, OSError, KeyError, TypeError, ValueError):
        return RunProgress(run.name, run.config.epochs)
    return RunProgress(run.name, run.config.epochs, len(rows), seconds, error)


def seconds_left(runs: Sequence[RunProgress], jobs: int) -> float | None:
    """Estimate how long the rest of some runs takes, `jobs` at a time; None: nothing is known yet.

    A run that has not begun counts with the mean time of an epoch of the others.

    Example:
        >>> seconds_left([RunProgress("a", 10, 5, 50.0), RunProgress("b", 10)], jobs=1)
        150.0
    """
    done = sum(run.done for run in runs)
    if not done:
        return None
    mean = sum(run.seconds for run in runs) / done
    left = [
        (run.epochs - run.done) * (run.seconds / run.done if run.done else mean) for run in runs
    ]
    # As long as the longest run alone, whatever the others do.
    return max(sum(left) / jobs, max(left))
