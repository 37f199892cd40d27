"""Read finished runs from their folders, or leave them out and say why."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.report import AllocationReport, read_log
from selectconv.core.models import count_slots, selective_layers
from selectconv.deploy.cost import Cost, count
from selectconv.errors import BadValue, SelectConvError
from selectconv.lab.train.config import TrainConfig, read_recorded
from selectconv.lab.train.network import build_model, load_weights, run_data
from selectconv.lab.train.run_folder import (
    ALLOCATION,
    CONFIG,
    HOLDOUT,
    LAST,
    METRICS,
    TIME,
    RunFolder,
)
from selectconv.lab.zoo.learned_group_conv import condense

_DEPTH = 4  # how far below a given folder runs are looked for: results/GRID/runs/NAME
OWN, CLOSED, MOVED = 0, 1, 2


@dataclass(frozen=True)
class LayerHistory:
    """The slots of one layer over the training, replayed from `allocation.jsonl`.

    Attributes:
        name: the layer's dotted name.
        can_shift: its slots may be shifted.
        source: the channel that each slot reads at the end.
        states: at the end of each epoch, of each slot: `OWN`, `CLOSED` or `MOVED`.
        closed: how often slots were closed.
        copied: how often channels were chosen as the source of a re-opened slot.
    """

    name: str
    can_shift: bool
    source: list[int]
    states: list[list[int]]
    closed: Counter[int]
    copied: Counter[int]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: its settings.
        gone: those that this version does not have: the run cannot be repeated.
        metrics: one row per epoch.
        environment: commit, versions, hardware.
        holdout: images, error in per cent and loss of `holdout.json`; empty where it was not asked.
        layers: what happened to the slots of each selective layer.
        size: of its network for one image, without closed slots and what only they read. Shift
            biases do not count, as in the paper. None: of a slimmed network it is known from the
            weights alone, and they were not kept.
        deployed: of what `compress` writes, with the convs that shift.
        time: what `reproduce --time` measured of it; empty where it did not.
    """

    path: Path
    config: TrainConfig
    gone: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    holdout: dict[str, Any]
    layers: list[LayerHistory]
    size: Cost | None
    deployed: Cost | None
    time: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name

    @property
    def error(self) -> float:
        """Test error of the last epoch, in per cent."""
        return self.score("test", "error")

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = ["--config", str(self.path / CONFIG), "--out", f"runs/{self.name}-again"]
        return shlex.join(["selectconv", "train", *words])

    def score(self, endpoint: str, measure: str) -> float:
        """Return the last weights' "error" or "loss" on the "test" or the "held-out" images."""
        if endpoint == "test":
            return float(self.metrics[-1][f"test_{measure}"])
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
    for folder in folders:
        # A run that lacks one of the two files is named, not overlooked.
        marks = ["*/" * depth + mark for depth in range(_DEPTH) for mark in (CONFIG, METRICS)]
        here = sorted({path.parent for mark in marks for path in folder.glob(mark)})
        if not here:
            found.left_out[folder] = "there is no run here or below."
        for path in here:
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
    metrics, status = folder.read(METRICS), folder.status()
    if status != "done" or len(metrics) != config.epochs:
        raise BadValue(
            f"incomplete: it is {status!r} and has {len(metrics)} of {config.epochs} epochs."
        )
    if metrics[-1]["test_error"] is None:
        raise BadValue("it has no test images, so there is no error to report.")
    environment = folder.read_environment()
    holdout = json.loads(folder.check(HOLDOUT).read_bytes()) if config.holdout else {}
    info, time = run_data(path, config), folder / TIME
    image = torch.zeros(1, *info.shape)
    network, layers = rebuild(path, config, metrics)
    is_unknown = config.method_info.cuts and not (folder / LAST).exists()
    deployed = size = None if is_unknown else count(network, image)
    if layers and config.granularity == "slot":
        model = build_model(config, info)
        for layer in layers:
            closed = [slot for slot, state in enumerate(layer.states[-1]) if state == CLOSED]
            selective_layers(model)[layer.name].close(closed)
        size = count(model, image)
    timed = json.loads(time.read_bytes()) if time.exists() else {}
    return Run(path, config, gone, metrics, environment, holdout, layers, size, deployed, timed)


def rebuild(
    path: Path, config: TrainConfig, metrics: Sequence[dict[str, Any]]
) -> tuple[nn.Module, list[LayerHistory]]:
    """Rebuild a run's network from its log, and what happened to its slots.

    It has the shape of the network that is deployed, with fresh weights; learned shifts are near
    where they were drawn.
    Of a slimmed network, only its weights know the shape.
    """
    info, method, weights = run_data(path, config), config.method_info, path / LAST
    log = RunFolder(path).check(ALLOCATION)
    steps = read_log(log) if log.exists() else []
    model = build_model(config, info)
    if method.is_selective:
        layers = _replay(model, steps, metrics)
        if not method.moves:
            method.build(config, info, model, None)  # +S draws its shifts before the training
        for layer in selective_layers(model).values() if config.shifts == "learned" else ():
            if layer.shift is not None:  # learned, it is not whole, wherever it began
                layer.shift.detach().add_(1 / 64)
        return model, layers
    if not method.cuts:
        condense(model, steps)
    elif weights.exists():
        load_weights(weights, model, slimmed=True)
    return model, []


def _replay(
    model: nn.Module, steps: Sequence[AllocationReport], metrics: Sequence[dict[str, Any]]
) -> list[LayerHistory]:
    """Replay a log on a fresh network, layer by layer in its order.

    Raises:
        ValueError, AllocationError: the log does not fit the network, or does not lead to what the
            metrics count.
    """
    layers = selective_layers(model)
    histories = {
        name: LayerHistory(name, layer.shift is not None, [], [], Counter(), Counter())
        for name, layer in layers.items()
    }
    allocator = ChannelAllocator(model, total_epochs=1)
    for epoch, row in enumerate(metrics):
        for plan in (step.plan for step in steps if step.epoch == epoch):
            allocator.apply(plan)
            for name, layer_plan in plan:
                if name in layers:  # filters are closed in other layers, too
                    histories[name].closed.update(layer_plan.closed.tolist())
                    histories[name].copied.update(layer_plan.source.tolist())
        for name, layer in layers.items():
            states = torch.where(layer.gate, MOVED * layer.moved, CLOSED)
            histories[name].states.append(states.tolist())
        if any(row[name] != number for name, number in count_slots(model).items()):
            raise BadValue(f"{ALLOCATION} does not lead to what {METRICS} count in epoch {epoch}.")
    return [replace(histories[name], source=layer.index.tolist()) for name, layer in layers.items()]
