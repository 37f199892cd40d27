"""A grid: the runs that fill a table, read from a data file.

A file of `grids/` has a block for each scale, and a block is a list of products model x data x
method x seed with the settings they share. The code knows nothing about a table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
        stage: runs of an earlier stage are started first.
        contest: the comparison of several networks that it belongs to, by name; empty: none.
        arm: what it is called there.
    """

    name: str
    settings: dict[str, Any]
    stage: int = 0
    contest: str = ""
    arm: str = ""

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
        contests: comparisons of several networks, by name: `title`, `test`, and `questions` in the
            order in which they are asked. Each has an `arm`, the arm that it is compared `against`,
            and perhaps a `measure` (default: error) or a `margin` within which it counts as no
            worse; without one, the question is whether it is lower. Those marked `apart` are asked
            whatever came before, with Holm's correction.
    """

    table: str
    scale: str
    title: str
    note: str
    test: str
    runs: tuple[PlannedRun, ...]
    first: tuple[str, ...] = ("select",)
    margin: float | None = None
    contests: Mapping[str, Any] = field(default_factory=dict)


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
    path = files("selectconv.lab.reproduce") / "grids" / f"{table}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    block = content["scales"][scale]
    runs = [run for part in block["runs"] for run in _expand(part, block.get("settings", {}))]
    return Grid(
        table=table,
        scale=scale,
        title=content["title"],
        note=" ".join(block["note"].split()),
        test=" ".join(content["test"].split()),
        runs=tuple(sorted(runs, key=lambda run: (run.stage, run.settings["seed"]))),
        first=tuple(content["first"]),
        margin=content.get("margin"),
        contests=block.get("contests", {}),
    )


def _expand(part: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[PlannedRun]:
    """Yield the runs of a product; `label` tells those apart that differ in other settings only."""
    axes = [part[name] if isinstance(part[name], list) else [part[name]] for name in _AXES]
    for values in product(*axes):
        *task, seed = map(str, values)
        words = [*task, part["label"], seed] if "label" in part else [*task, seed]
        settings = {**shared, **part.get("settings", {}), **dict(zip(_AXES, values, strict=True))}
        name, contest = as_file_name("-".join(words)), part.get("contest", "")
        arm = part.get("arm", settings["method"])
        yield PlannedRun(name, settings, part.get("stage", 0), contest, arm)
