"""Which runs can be compared: same network, same data, same training."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from selectconv.deploy.cost import Cost
from selectconv.lab.report.collect import Run
from selectconv.lab.reproduce.grid import Grid
from selectconv.lab.train.config import TrainConfig, setting_names
from selectconv.lab.train.methods import METHODS

NO_GRID = Grid("table1", "", "selectconv: report of runs", "", "", ())  # for runs of no grid


@dataclass(eq=False)
class Row:
    """The runs of a method with one way of selecting channels, learning rate and weight decay.

    Attributes:
        method: what users type.
        settings: those about selection that make a difference to the method, and tuning.
        gone: settings of the runs that this version does not have.
        runs: the finished ones, by seed.
        missing: why a planned run is not among them, by its name.
        unused: runs with the same settings and seed as one of `runs`.
        endpoint: what errors and losses are of, as for its comparison.
        named: settings that are part of its name: tuning in which the rows of its comparison
            differ, and ways of selecting in which rows of the same method do.
        label: its name in a comparison of several networks, in place of all that.
    """

    method: str
    settings: dict[str, Any]
    gone: dict[str, Any]
    runs: dict[int, Run] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unused: list[Run] = field(default_factory=list)
    endpoint: str = "test"
    named: list[str] = field(default_factory=list)
    label: str = ""

    @property
    def arm(self) -> str:
        """The paper's name of the method, with the settings that are gone."""
        gone = [f"{name} {value}" for name, value in self.gone.items()]
        return ", ".join([METHODS[self.method].paper_name, *gone])

    @property
    def name(self) -> str:
        """Its arm, and the settings that tell it from other rows."""
        words = [f"{name} {self.settings[name]}" for name in self.named]
        return self.label or (f"{self.arm} ({', '.join(words)})" if words else self.arm)

    def measured(self, measure: str) -> dict[int, float]:
        """Return the last weights' "error" or "loss" at the endpoint, by seed."""
        return {seed: run.score(self.endpoint, measure) for seed, run in self.runs.items()}

    def costs(self, kind: str) -> list[Cost]:
        """Return the runs' "size" or "deployed" cost, as far as it is known."""
        return [cost for run in self.runs.values() if (cost := getattr(run, kind)) is not None]


NO_ROW = Row("", {}, {})  # stands for a method that has no finished run


@dataclass(eq=False)
class Group:
    """A comparison: methods that differ in nothing but the selection of channels.

    Attributes:
        config: the settings of one of its runs.
        grid: where its runs were planned, and the questions about them.
        rows: one for each method, in the order of Section 3.3.
        apart: settings that tell it from other comparisons with the same title.
        contest: of several networks: its title, test and questions, as the grid has them.
    """

    config: dict[str, Any]
    grid: Grid
    rows: list[Row] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    contest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """The finished runs of all rows."""
        return [run for row in self.rows for run in row.runs.values()]

    @property
    def endpoint(self) -> str:
        """What errors and losses are of: "held-out" if every finished run has them, or "test"."""
        is_held_out = self.runs and all(run.holdout for run in self.runs)
        return "held-out" if is_held_out else "test"

    @property
    def baselines(self) -> list[Row]:
        """The rows of plain training or, without a finished run of it, of another baseline."""
        names = [name for name, method in METHODS.items() if method.is_baseline]
        finished = [row.method for row in self.rows if row.runs]
        chosen = next((name for name in names if name in finished), names[0])
        return [row for row in self.rows if row.method == chosen]

    def baseline(self, measure: str) -> Row:
        """Return what other methods are compared with: of several plain rows, the best one."""
        finished = [row for row in self.baselines if row.runs]
        means = {row: fmean(row.measured(measure).values()) for row in finished}
        return min(finished, key=lambda row: means[row], default=NO_ROW)

    def find(self, method: str) -> Row:
        """Return the first row of a method with finished runs, and with no setting that is gone."""
        return next(
            (row for row in self.rows if row.method == method and row.runs and not row.gone), NO_ROW
        )

    @property
    def title(self) -> str:
        """Network, data and training, in words."""
        config, size = self.config, self.config["image_size"]
        options = [f"{k} {v}" for k, v in config["model_options"].items() if k != "realloc"]
        words = [
            config["model"],
            f"({', '.join(options)})" if options else "",
            f"on {config['data']}",
            f"({config['subset']:,} images)" if config["subset"] else "",
            f"at {size}x{size}" if size else "",
        ]
        end = [f"{config['epochs']} epochs", *(f"{name} {config[name]}" for name in self.apart)]
        return self.contest.get("title") or ", ".join([" ".join(filter(None, words)), *end])


def group_runs(
    runs: Sequence[Run], grid: Grid = NO_GRID, problems: Mapping[str, str] | None = None
) -> list[Group]:
    """Sort runs into comparisons.

    Args:
        runs: finished runs. Of two with the same settings the first is taken.
        grid: the runs that were planned.
        problems: why a planned run is missing, by its name.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    rows: dict[tuple[Any, ...], Row] = {}

    planned = {run.name: run for run in grid.runs}
    arms = list(dict.fromkeys((run.contest, run.arm) for run in grid.runs))

    def row_of(name: str, config: TrainConfig, gone: dict[str, Any]) -> Row:
        settings = config.to_dict()
        place, rank, row = _place(settings, gone)
        contest = planned[name].contest if name in planned else ""
        if contest:
            place, row.label = ("", contest), planned[name].arm
            rank = (arms.index((contest, row.label)),)
        groups.setdefault(place, Group(settings, grid, contest=grid.contests.get(contest, {})))
        return rows.setdefault((place, rank), row)

    for run in runs:
        row = row_of(run.name, run.config, run.gone)
        if row.runs.setdefault(run.config.seed, run) is not run:
            row.unused.append(run)
    finished = {run.name for run in runs}
    for name in [name for name in planned if name not in finished]:
        reason = (problems or {}).get(name, "not finished")
        row_of(name, planned[name].config, {}).missing[name] = reason
    for (place, _), row in sorted(rows.items(), key=lambda item: item[0]):
        groups[place].rows.append(row)
    ordered = [groups[place] for place in sorted(groups)]
    for group in ordered:
        tuned = _differing([row.settings for row in group.rows], setting_names("tuning"))
        for row in group.rows:
            row.endpoint = group.endpoint
            same = [other.settings for other in group.rows if other.arm == row.arm]
            row.named = [*tuned, *_differing(same, sorted(METHODS[row.method].uses))]
    # Where titles are equal, add the settings that differ.
    titles = {group: group.title for group in ordered}
    for group in ordered:
        alike = [other.config for other in ordered if titles[other] == titles[group]]
        group.apart = _differing(alike, setting_names("training"))
    return ordered


def _place(
    config: Mapping[str, Any], gone: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[Any, ...], Row]:
    """Return the key of the comparison that settings belong to, that of the row, and the row."""
    method = METHODS[config["method"]]
    options = dict(config["model_options"])
    values = {**config, "realloc": options.pop("realloc", None), "model_options": options}
    training = {name: values[name] for name in (*setting_names("training"), "model_options")}
    settings = {name: values[name] for name in (*sorted(method.uses), *setting_names("tuning"))}
    place = (config["model"], config["data"], json.dumps(training, sort_keys=True))
    rank = (method.rank, bool(gone), json.dumps([settings, gone]))
    return place, rank, Row(method.name, settings, gone)


def _differing(settings: list[dict[str, Any]], names: Iterable[str]) -> list[str]:
    """Return the names of those settings that are not the same in all."""
    first, *others = settings
    return [name for name in names if any(one[name] != first[name] for one in others)]
