"""One run of a grid as a process of its own: its state, its command, and how it ended."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from selectconv.errors import RunError, UsageError
from selectconv.files import write_text
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.train.config import resolve
from selectconv.lab.train.run_folder import CONFIG, RunFolder

RUNS, LOGS = "runs", "logs"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        name: of the run.
        problem: why it failed; None: it is done.
    """

    name: str
    problem: str | None


def find_state(run: PlannedRun, out: Path) -> str:
    """Return whether a run is `done`, can `resume`, is `new`, or `cannot` run.

    Raises:
        UsageError: its folder holds a run with other settings.
    """
    if run.problem is not None:
        return "cannot"
    folder = RunFolder(out / RUNS / run.name)
    if folder.is_empty() or not (folder / CONFIG).exists():
        return "new"
    try:
        saved = resolve(folder.read_config()).to_dict()  # settings it is too old to have: defaults
    except RunError as error:
        raise UsageError(
            f"{error} Delete {folder.path} to run it again, or choose another --out."
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{folder.path} holds a run written by another version: {error}"
        ) from error
    for key, wanted in run.config.to_dict().items():
        if saved[key] != wanted:
            raise UsageError(
                f"{folder.path} holds a run with {key} {saved[key]!r}, wanted {wanted!r}: choose "
                "another --out."
            )
    return "done" if folder.status() == "done" else "resume"


def prepare(run: PlannedRun, out: Path) -> list[str]:
    """Write a run's settings and return the command that starts or resumes it."""
    folder = out / RUNS / run.name
    command = [sys.executable, "-m", "selectconv", "train"]
    if find_state(run, out) in ("resume", "done"):  # a run that is done says so, and ends
        return [*command, "--out", str(folder), "--resume"]
    settings = out / LOGS / f"{run.name}.yaml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    write_text(settings, yaml.safe_dump(run.settings, sort_keys=False))
    more = [] if RunFolder(folder).is_empty() else ["--overwrite"]  # killed before its settings
    return [*command, "--config", str(settings), "--out", str(folder), *more]


def start(run: PlannedRun, out: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a run; what it prints goes to its log."""
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    command = prepare(run, out)
    with (out / LOGS / f"{run.name}.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    # Otherwise a run would outlive the process that started it, while its successor resumes it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def conclude(run: PlannedRun, out: Path, code: int) -> Outcome:
    """Return how a process ended."""
    if code == 0:
        return Outcome(run.name, None)
    log = (out / LOGS / f"{run.name}.txt").read_text(encoding="utf-8", errors="replace")
    lines = log.strip().splitlines()
    last = lines[-1].removeprefix("selectconv: ") if lines else "it said nothing"
    if code < 0:
        last = f"killed by signal {-code}; the last line was: {last}"
    return Outcome(run.name, last)
