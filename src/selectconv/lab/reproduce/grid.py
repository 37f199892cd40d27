"""A grid: the runs that fill a table, read from a data file.

A file of `grids/` has a block for each scale, and a block is a list of products model x data x
method x seed with the settings they share. The code knows nothing about a table.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from selectconv.checks import check_choice
from selectconv.lab.train.config import TrainConfig, as_file_name, resolve

TABLES = ("table1", "table2", "table3", "ablation")
SCALES = ("full", "reduced", "smoke")
_AXES = ("model", "data", "method", "seed")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid.

    Attributes:
        name: of its folder, unique in the grid.
        settings: what differs from the paper's defaults, as for `resolve`.
        problem: why it cannot run; None: it can.
        stage: runs of an earlier stage are started first.
    """

    name: str
    settings: dict[str, Any]
    problem: str | None = None
    stage: int = 0

    @cached_property
    def config(self) -> TrainConfig:
        """All settings."""
        return resolve(self.settings)


@dataclass(frozen=True)
class Grid:
    """The runs of a table at a scale.

    Attributes:
        table: one of `TABLES`.
        scale: one of `SCALES`.
        title: of the table.
        note: what to know about the scale, in a sentence.
        test: the statistical test, named before the runs.
        first: the methods of the first question; others are corrected for their number.
        margin: points of error within which a method counts as no worse; None: not tested.
        runs: in the order in which they are started: stage by stage, within a stage seed by seed,
            so that what is finished early can be compared.
    """

    table: str
    scale: str
    title: str
    note: str
    test: str
    runs: tuple[PlannedRun, ...]
    first: tuple[str, ...] = ("select",)
    margin: float | None = None

    def missing(
        self, done: Container[str], problems: Mapping[str, str | None]
    ) -> list[tuple[str, dict[str, Any], str]]:
        """List name, settings and reason of the runs that are not done."""
        return [
            (run.name, run.settings, problems.get(run.name) or run.problem or "not finished")
            for run in self.runs
            if run.name not in done
        ]


def load_grid(table: str, scale: str) -> Grid:
    """Read the grid of a table.

    Raises:
        ValueError: an unknown table or scale; the nearest one is named.

    Example:
        >>> grid = load_grid("table3", "full")
        >>> len(grid.runs), grid.runs[0].name
        (12, 'densenet121-imagenet-plain-0')
    """
    check_choice("table", table, TABLES)
    check_choice("scale", scale, SCALES)
    text = (files("selectconv.lab.reproduce") / "grids" / f"{table}.yaml").read_text(
        encoding="utf-8"
    )
    content = yaml.safe_load(text)
    block = content["scales"][scale]
    runs = [run for part in block["runs"] for run in _expand(part, block.get("settings", {}))]
    names = [run.name for run in runs]
    assert len(set(names)) == len(names), f"{table}, {scale}: two runs have the same name"
    return Grid(
        table=table,
        scale=scale,
        title=content["title"],
        note=" ".join(block["note"].split()),
        test=" ".join(content["test"].split()),
        runs=tuple(sorted(runs, key=lambda run: (run.stage, int(run.settings["seed"])))),
        first=tuple(content["first"]),
        margin=content.get("margin"),
    )


def _expand(part: Mapping[str, Any], shared: Mapping[str, Any]) -> list[PlannedRun]:
    axes = [part[name] if isinstance(part[name], list) else [part[name]] for name in _AXES]
    label = part.get("label")  # tells runs apart that differ in other settings only
    runs = []
    for values in product(*axes):
        settings = {**shared, **part.get("settings", {}), **dict(zip(_AXES, values, strict=True))}
        words = [str(value) for value in values]
        name = "-".join([*words[:3], label, words[3]] if label else words)
        name = as_file_name(name)
        try:
            resolve(settings)
            problem = None
        except (TypeError, ValueError) as error:
            problem = str(error)
        runs.append(PlannedRun(name, settings, problem, part.get("stage", 0)))
    return runs
