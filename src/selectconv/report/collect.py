"""Runs as a report needs them: read from their folders, or left out with the reason."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selectconv import __version__
from selectconv.errors import SelectConvError
from selectconv.train.config import TrainConfig, resolve
from selectconv.train.records import ALLOCATION, CONFIG, ENVIRONMENT, LAST, METRICS, RunFolder

_DEPTH = 3  # how far below a given folder runs are looked for


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: its settings.
        metrics: a line an epoch.
        allocation: a line for every step that changed something.
        environment: commit, versions, hardware; empty where there is no such file.
    """

    path: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    allocation: list[dict[str, Any]]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name

    @property
    def error(self) -> float:
        """Test error of the last epoch, in per cent."""
        return float(self.metrics[-1]["test_error"])

    @property
    def best_error(self) -> float:
        """Lowest test error of an epoch, which was chosen by looking at the test set."""
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
        """What repeats the run."""
        return f"selectconv train --config {self.path / CONFIG} --out runs/{self.name}"


@dataclass(frozen=True)
class Collection:
    """What was found in some folders.

    Attributes:
        runs: the finished runs.
        left_out: a line for everything that is not among them, with the reason.
        notes: a line for runs that are, but with something to know.
    """

    runs: list[Run]
    left_out: list[str]
    notes: list[str]


def collect(folders: Iterable[Path]) -> Collection:
    """Read the runs in folders, each a run or a folder with runs somewhere below.

    Example:
        >>> collect([Path("no/such/folder")]).left_out
        ['no/such/folder: there is no such folder.']
    """
    found = Collection([], [], [])
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
            except (SelectConvError, TypeError, ValueError, KeyError) as error:
                found.left_out.append(f"{path}: {' '.join(str(error).split())}")
                continue
            found.runs.append(run)
            version = run.environment.get("versions", {}).get("selectconv")
            if version != __version__:
                found.notes.append(f"{path}: of selectconv {version}; this is {__version__}.")
    return found


def _absent(path: Path) -> str:
    return "is a file, not a folder" if path.exists() else "there is no such folder"


def _find_runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    marks = (CONFIG, METRICS)  # a run that lacks one of them is to be named, not overlooked
    patterns = ["/".join(["*"] * depth + [mark]) for depth in range(_DEPTH) for mark in marks]
    return sorted({path.parent for pattern in patterns for path in folder.glob(pattern)})


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises:
        RunError, ValueError: it is incomplete, damaged, or of a version with other settings.
    """
    folder = RunFolder(path)
    environment = _read_environment(folder)
    try:
        config = resolve(folder.read_config())
    except (TypeError, ValueError) as error:
        version = environment.get("versions", {}).get("selectconv")
        raise ValueError(
            f"its settings are not those of this version ({__version__}; the run is of {version}): "
            f"{error}"
        ) from error
    metrics = folder.read(METRICS)
    if folder.status() != "done" or len(metrics) != config.epochs:
        raise ValueError(
            f"incomplete: it is {folder.status()!r} and has {len(metrics)} of {config.epochs} "
            "epochs; left out."
        )
    wanted: Sequence[str] = ("epoch", "test_loss", "test_error", "seconds", "moved", "closed")
    for row in metrics:
        missing = [name for name in wanted if name not in row]
        if missing:
            raise ValueError(f"{METRICS} has no {missing[0]!r} at epoch {row.get('epoch')}.")
    return Run(path, config, metrics, folder.read(ALLOCATION), environment)


def _read_environment(folder: RunFolder) -> dict[str, Any]:
    try:
        content = json.loads((folder / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
