"""Read finished runs from their folders, or leave them out and say why."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from selectconv.allocate.report import read_log
from selectconv.deploy.cost import Cost, count
from selectconv.errors import SelectConvError
from selectconv.lab.report.replay import CLOSED, MOVED, LayerHistory, replay
from selectconv.lab.train.checkpoint import load_weights
from selectconv.lab.train.config import TrainConfig, read_recorded
from selectconv.lab.train.network import build_model
from selectconv.lab.train.run_data import run_data
from selectconv.lab.train.run_folder import (
    ALLOCATION,
    CONFIG,
    ENVIRONMENT,
    HOLDOUT,
    LAST,
    METRICS,
    RunFolder,
)
from selectconv.lab.zoo.learned_group_conv import condense

_DEPTH = 4  # how far below a given folder runs are looked for: results/GRID/runs/NAME


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: its settings.
        gone: those that this version does not have: the run cannot be repeated.
        metrics: one row per epoch.
        environment: commit, versions, hardware.
        holdout: images, error in per cent and loss of `holdout.json`; None where it was not asked.
        layers: what happened to the slots of each selective layer.
        size: of its network for one image, without closed slots and what only they read. Shift
            biases do not count, as in the paper. None: of a slimmed network it is known from the
            weights alone, and they were not kept.
    """

    path: Path
    config: TrainConfig
    gone: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    holdout: dict[str, Any] | None
    layers: list[LayerHistory]
    size: Cost | None

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name

    @property
    def error(self) -> float:
        """Test error of the last epoch, in per cent."""
        return self.score("test", "error")

    @property
    def best_error(self) -> float:
        """The lowest test error of any epoch, chosen on the test set."""
        return min(float(row["test_error"]) for row in self.metrics)

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

    def score(self, endpoint: str, measure: str) -> float:
        """Return the last weights' "error" or "loss" on the "test" or the "held-out" images."""
        if endpoint == "test":
            return float(self.metrics[-1][f"test_{measure}"])
        assert self.holdout is not None
        return float(self.holdout[measure])


@dataclass(frozen=True)
class Collection:
    """What was found in some folders.

    Attributes:
        runs: the finished runs.
        left_out: why a run, or a folder, is not among them.
    """

    runs: list[Run] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)


def collect(folders: Iterable[Path]) -> Collection:
    """Read the runs in folders, each a run or a folder with runs somewhere below.

    Example:
        >>> collect([Path("no/such/folder")]).left_out
        {PosixPath('no/such/folder'): 'there is no run here or below.'}
    """
    found = Collection()
    paths: dict[Path, Path] = {}
    for folder in folders:
        # A run that lacks one of the two files is named, not overlooked.
        marks = ["*/" * depth + mark for depth in range(_DEPTH) for mark in (CONFIG, METRICS)]
        here = sorted({path.parent for mark in marks for path in folder.glob(mark)})
        if not here:
            found.left_out[folder] = "there is no run here or below."
        for path in here:
            paths.setdefault(path.resolve(), path)
    for path in paths.values():
        try:
            found.runs.append(read_run(path))
        except (SelectConvError, OSError, RuntimeError, TypeError, ValueError) as error:
            found.left_out[path] = " ".join(str(error).split())
    return found


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises:
        SelectConvError, RuntimeError, TypeError, ValueError: it is incomplete or damaged, or its
            settings, log or weights do not fit a network of this version.
    """
    folder = RunFolder(path)
    config, gone = read_recorded(folder.read_config())
    metrics = folder.read(METRICS)
    if folder.status() != "done" or len(metrics) != config.epochs:
        raise ValueError(
            f"incomplete: it is {folder.status()!r} and has {len(metrics)} of {config.epochs} "
            "epochs."
        )
    if metrics[-1]["test_error"] is None:
        raise ValueError("it has no test images, so there is no error to report.")
    environment = json.loads(folder.check(ENVIRONMENT).read_bytes())
    holdout = json.loads(folder.check(HOLDOUT).read_bytes()) if config.holdout else None
    log = folder.check(ALLOCATION)
    allocation = read_log(log, epochs=config.epochs) if log.exists() else []
    info = run_data(path, config)
    model = build_model(config, info)
    layers = replay(model, allocation, config.epochs) if config.method_info.is_selective else []
    for name, state in (("closed", CLOSED), ("moved", MOVED)):
        replayed = sum(layer.last.count(state) for layer in layers)
        if config.method_info.is_selective and replayed != metrics[-1][name]:
            raise ValueError(
                f"{replayed} slots are {name} by {ALLOCATION}, {metrics[-1][name]} by {METRICS}."
            )
    weights = folder / LAST
    if config.method_info.cuts and weights.exists():
        load_weights(weights, model, slimmed=True)
    elif not (config.method_info.cuts or config.method_info.is_selective):
        condense(model, allocation)
    is_known = weights.exists() or not config.method_info.cuts
    size = count(model, torch.zeros(1, *info.shape)) if is_known else None
    return Run(path, config, gone, metrics, environment, holdout, layers, size)
