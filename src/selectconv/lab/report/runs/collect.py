"""Read finished runs from their folders, or leave them out and say why."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selectconv import __version__
from selectconv.allocate.report import AllocationReport, read_log
from selectconv.errors import SelectConvError
from selectconv.lab.train.config import TrainConfig, read_recorded
from selectconv.lab.train.run_folder import (
    ALLOCATION,
    CONFIG,
    ENVIRONMENT,
    HOLDOUT,
    LAST,
    METRICS,
    RunFolder,
)

_DEPTH = 4  # how far below a given folder runs are looked for: results/GRID/runs/NAME


@dataclass(frozen=True, eq=False)  # each is itself, and can be the key of a cache
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: its settings.
        metrics: one row per epoch.
        allocation: one report for each step that changed something.
        environment: commit, versions, hardware; empty if there is no such file.
        holdout: images, error in per cent and loss of `holdout.json`; None where it was not asked.
        gone: settings that this version does not have: the run cannot be repeated.
    """

    path: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    allocation: list[AllocationReport]
    environment: dict[str, Any]
    holdout: dict[str, Any] | None = None
    gone: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """All its settings, also those that are gone."""
        return {**self.config.to_dict(), **self.gone}

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name

    @property
    def error(self) -> float:
        """Test error of the last epoch, in per cent."""
        return float(self.metrics[-1]["test_error"])

    @property
    def loss(self) -> float:
        """Test loss of the last epoch."""
        return float(self.metrics[-1]["test_loss"])

    @property
    def best_error(self) -> float:
        """The lowest test error of any epoch, chosen on the test set."""
        return min(float(row["test_error"]) for row in self.metrics)

    @property
    def seconds(self) -> float:
        """Time of all epochs."""
        return sum(float(row["seconds"]) for row in self.metrics)

    @property
    def weights(self) -> Path | None:
        """The last weights; None where they were not kept."""
        path = self.path / LAST
        return path if path.exists() else None

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = ["--config", str(self.path / CONFIG), "--out", f"runs/{self.name}-again"]
        return shlex.join(["selectconv", "train", *words])


@dataclass(frozen=True)
class Collection:
    """What was found in some folders.

    Attributes:
        runs: the finished runs.
        left_out: one line for each run or folder that is not among them, with the reason.
        notes: one line for each run among them that needs a remark.
        reasons: why a run that was found is not among them, by its name.
    """

    runs: list[Run] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def leave_out(self, path: Path, error: Exception) -> None:
        """Note a run that will not be reported, and why."""
        reason = " ".join(str(error).split())
        self.left_out.append(f"{path}: {reason}")
        self.reasons[path.name] = reason


def collect(folders: Iterable[Path]) -> Collection:
    """Read the runs in folders, each a run or a folder with runs somewhere below.

    Example:
        >>> collect([Path("no/such/folder")]).left_out
        ['no/such/folder: there is no such folder.']
    """
    found = Collection()
    seen: set[Path] = set()
    for folder in folders:
        paths = _find_runs(folder)
        if not paths:
            what = "is not a run and has none below it" if folder.is_dir() else _absent(folder)
            found.left_out.append(f"{folder}: {what}.")
        for path in paths:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                run = read_run(path)
            except (SelectConvError, OSError, TypeError, ValueError) as error:
                found.leave_out(path, error)
                continue
            found.runs.append(run)
            version = _version_of(run.environment)
            if version != __version__:
                found.notes.append(
                    f"{path}: written by selectconv {version}; this is {__version__}."
                )
    return found


def _absent(path: Path) -> str:
    return "is a file, not a folder" if path.exists() else "there is no such folder"


def _find_runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    marks = (CONFIG, METRICS)  # a run that lacks one of them is named, not overlooked
    patterns = ["/".join(["*"] * depth + [mark]) for depth in range(_DEPTH) for mark in marks]
    return sorted({path.parent for pattern in patterns for path in folder.glob(pattern)})


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises:
        RunError, ValueError: it is incomplete, damaged, or of a version with other settings.
    """
    folder = RunFolder(path)
    environment = _read_environment(folder)
    settings = folder.read_config()
    try:
        config, gone = read_recorded(settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its settings are not those of this version ({__version__}; the run was written "
            f"by {_version_of(environment)}): {error}"
        ) from error
    metrics = folder.read(METRICS)
    if folder.status() != "done" or len(metrics) != config.epochs:
        raise ValueError(
            f"incomplete: it is {folder.status()!r} and has {len(metrics)} of {config.epochs} "
            "epochs; left out."
        )
    for epoch, row in enumerate(metrics):
        _check_metrics(row, epoch)
    log = folder.check(ALLOCATION)
    allocation = read_log(log, epochs=config.epochs) if log.exists() else []
    holdout = _read_holdout(folder) if config.holdout else None
    return Run(path, config, metrics, allocation, environment, holdout, gone)


def _check_metrics(row: object, epoch: int) -> None:
    if not isinstance(row, Mapping) or row.get("epoch") != epoch:
        raise ValueError(f"{METRICS}, line {epoch + 1}, is not that of epoch {epoch}.")
    if row.get("test_error", 0) is None:
        raise ValueError("it has no test images, so there is no error to report.")
    _check_numbers(
        row, ("test_loss", "test_error", "seconds", "moved", "closed"), f"{METRICS}, epoch {epoch}"
    )


def _check_numbers(row: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}: `{name}` is not a number: {value!r}.")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: `{name}` is {value}.")


def _read_holdout(folder: RunFolder) -> dict[str, Any]:
    try:
        content = json.loads(folder.check(HOLDOUT).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"it has no {HOLDOUT}, which its settings ask for.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{HOLDOUT} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{HOLDOUT} does not hold a result.")
    _check_numbers(content, ("images", "error", "loss"), HOLDOUT)
    return content


def _read_environment(folder: RunFolder) -> dict[str, Any]:
    try:
        content = json.loads(folder.check(ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _version_of(environment: Mapping[str, Any]) -> object:
    versions = environment.get("versions")
    return versions.get("selectconv") if isinstance(versions, Mapping) else None
