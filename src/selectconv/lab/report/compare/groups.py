"""Which runs can be compared: same network, same data, same training."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from selectconv.lab.report.compare.statistics import summarize
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.train.config import resolve, setting_names
from selectconv.lab.train.methods import METHODS

# Where the paper has SelectChannel (API of `create_model`); the authors' code has it elsewhere.
PAPERS_PLACEMENT = "input"
PAPERS_GROWTH = "importance"
# The first question, where a grid names none: these methods against the baseline.
FIRST = ("select",)
# How channels are selected: differs between the rows of a comparison.
_SELECTION = (*setting_names("selection"), "realloc")


@dataclass(frozen=True, order=True)
class GroupKey:
    """What the runs of a comparison share.

    Attributes:
        model: the network.
        data: the data set.
        text: the other settings as JSON, which tells groups apart and puts them in order.
        settings: the same by name.
    """

    model: str
    data: str
    text: str
    settings: Mapping[str, Any] = field(compare=False)


@dataclass(frozen=True, order=True)
class RowKey:
    """A method with its way of selecting channels and its learning rate and weight decay.

    Attributes:
        rank: its place among the rows.
        method: what users type.
        placement: where channels are selected.
        text: the settings below as JSON, which tells rows apart and puts them in order.
        selection: the settings about selection, by name.
        tuning: learning rate and weight decay, by name.
    """

    rank: int
    method: str
    placement: str
    text: str
    selection: Mapping[str, Any] = field(compare=False)
    tuning: Mapping[str, Any] = field(compare=False)

    @property
    def growth(self) -> str:
        """The rule that chooses what re-opened slots read."""
        return self.selection.get("growth") or PAPERS_GROWTH

    @property
    def name(self) -> str:
        """The paper's name of the method; a placement or rule other than the paper's is named."""
        name = METHODS[self.method].paper_name if self.method in METHODS else self.method
        if self.placement != PAPERS_PLACEMENT:
            name += f" {self.placement}"
        return name if self.growth == PAPERS_GROWTH else f"{name}, growth by {self.growth}"


def keys_of(config: Mapping[str, Any]) -> tuple[GroupKey, RowKey]:
    """Return the comparison, and its row, that a run with these settings belongs to."""
    options = dict(config["model_options"])
    selection = {"realloc": options.pop("realloc", None)}
    placement = options.pop("placement", PAPERS_PLACEMENT)
    selection |= {name: config[name] for name in _SELECTION if name in config}
    rest = {name: value for name, value in config.items() if name in setting_names("training")}
    tuning = {name: config[name] for name in setting_names("tuning")}
    rest["model_options"] = options
    method = METHODS.get(config["method"])  # None: planned, and not one of ours
    if method is not None:
        selection = {name: selection.get(name) for name in method.uses}
        placement = placement if method.is_selective else PAPERS_PLACEMENT
    selection |= {name: value for name, value in config.items() if name not in setting_names()}
    rank = 3 * (len(METHODS) if method is None else method.rank)
    growth = selection.get("growth") or PAPERS_GROWTH
    rank += (placement != PAPERS_PLACEMENT) + (growth != PAPERS_GROWTH)  # after the paper's
    rest, selection = dict(sorted(rest.items())), dict(sorted(selection.items()))
    text = json.dumps([selection, tuning])
    return (
        GroupKey(config["model"], config["data"], json.dumps(rest, sort_keys=True), rest),
        RowKey(rank, config["method"], placement, text, selection, tuning),
    )


@dataclass
class Row:
    """The runs of a method.

    Attributes:
        key: the method.
        runs: the finished ones, by seed.
        missing: why a run is not among them, by its name.
        is_held_out: the endpoint is every image that was not trained on, not the test images alone.
        told: settings that are part of its name: tuning in which the rows of its comparison
            differ, and ways of selecting in which rows of the same name do.
    """

    key: RowKey
    runs: dict[int, Run]
    missing: dict[str, str]
    is_held_out: bool = False
    told: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its method, and the settings that tell it from other rows."""
        values = {**self.key.selection, **self.key.tuning}
        words = [f"{name} {values[name]}" for name in self.told]
        return f"{self.key.name} ({', '.join(words)})" if words else self.key.name

    @property
    def short_name(self) -> str:
        """A shorter name, for the axis of a figure."""
        return self.name.replace(" (select)", "")

    def measured(self, measure: str) -> dict[int, float]:
        """Return the last weights' "error" or "loss" at the endpoint, by seed."""
        return {seed: self._score(run, measure) for seed, run in self.runs.items()}

    def mean(self, measure: str, seeds: Iterable[int]) -> float:
        """Return the mean of a measure over some of the seeds."""
        values = self.measured(measure)
        return summarize([values[seed] for seed in seeds]).mean

    def _score(self, run: Run, measure: str) -> float:
        if self.is_held_out:
            assert run.holdout is not None
            return float(run.holdout[measure])
        return float(getattr(run, measure))


@dataclass
class Group:
    """A comparison: methods that differ in nothing but the selection of channels.

    Attributes:
        key: what they share.
        config: the settings of one of them.
        rows: by method.
        first: the methods of the first question; the others are corrected for their number.
        margin: points of error within which a method counts as no worse; None: not tested.
        apart: settings that tell it from other comparisons with the same title.
    """

    key: GroupKey
    config: dict[str, Any]
    rows: dict[RowKey, Row]
    first: tuple[str, ...] = FIRST
    margin: float | None = None
    apart: tuple[str, ...] = ()

    @property
    def is_held_out(self) -> bool:
        """Whether every finished run was tested on all images that it was not trained on."""
        runs = [run for row in self.rows.values() for run in row.runs.values()]
        return bool(runs) and all(run.holdout is not None for run in runs)

    @property
    def endpoint(self) -> str:
        """What errors and losses are of: "held-out" or "test"."""
        return "held-out" if self.is_held_out else "test"

    @property
    def baselines(self) -> list[Row]:
        """The finished rows of plain training or, without it, of learned group convolution."""
        for name in (method.name for method in METHODS.values() if method.is_baseline):
            rows = [row for row in self.rows.values() if row.key.method == name and row.runs]
            if rows:
                return rows
        return []

    def is_baseline(self, row: Row) -> bool:
        """Return whether other methods are compared with a row's, finished or not."""
        return any(row.key.method == one.key.method for one in self.baselines)

    def baseline(self, measure: str) -> Row | None:
        """Return what other methods are compared with: of several plain rows, the best one."""
        rows = self.baselines
        return min(rows, key=lambda row: row.mean(measure, row.runs)) if rows else None

    def find(self, method: str, placement: str = PAPERS_PLACEMENT) -> Row | None:
        """Return the row of a method, by the paper's rule, with finished runs: the first one."""
        for key, row in self.rows.items():
            is_papers = key.placement == placement and key.growth == PAPERS_GROWTH
            if key.method == method and is_papers and row.runs:
                return row
        return None

    @property
    def title(self) -> str:
        """Network, data and training, in words."""
        config = self.config
        aside = ("realloc", "placement")
        options = {k: v for k, v in config["model_options"].items() if k not in aside}
        words = [config["model"]]
        if options:
            words.append("(" + ", ".join(f"{k} {v}" for k, v in options.items()) + ")")
        words.append(f"on {config['data']}")
        if config["subset"]:
            words.append(f"({config['subset']:,} images)")
        if config["image_size"]:
            words.append(f"at {config['image_size']}x{config['image_size']}")
        end = [f"{config['epochs']} epochs", *(f"{name} {config[name]}" for name in self.apart)]
        return ", ".join([" ".join(words), *end])


def group_runs(
    runs: Iterable[Run],
    missing: Iterable[tuple[str, Mapping[str, Any], str]] = (),
    first: tuple[str, ...] = FIRST,
    margin: float | None = None,
) -> list[Group]:
    """Sort runs into comparisons.

    Args:
        runs: finished runs. Of two with the same settings the first is taken.
        missing: name, settings and reason of planned runs that are not finished.
        first: as for `Group`.
        margin: as for `Group`.
    """
    groups: dict[GroupKey, Group] = {}

    def row_of(config: Mapping[str, Any]) -> Row:
        group_key, row_key = keys_of(config)
        group = groups.setdefault(group_key, Group(group_key, dict(config), {}, first, margin))
        return group.rows.setdefault(row_key, Row(row_key, {}, {}))

    for run in runs:
        row_of(run.settings).runs.setdefault(run.config.seed, run)
    for name, settings, reason in missing:
        row_of(_planned_config(settings)).missing[name] = reason
    ordered = sorted(groups.values(), key=lambda group: group.key)
    for group in ordered:
        group.rows = dict(sorted(group.rows.items()))
        tuned = _differing(key.tuning for key in group.rows)
        for key, row in group.rows.items():
            row.is_held_out = group.is_held_out
            row.told = tuned + _differing(k.selection for k in group.rows if k.name == key.name)
    _tell_apart(ordered)
    return ordered


def _differing(settings: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the settings that are not the same in all."""
    first, *others = settings
    return tuple(name for name in first if any(one[name] != first[name] for one in others))


def find_duplicates(runs: Iterable[Run]) -> list[str]:
    """Name the runs that are in no table because another has the same settings and seed."""
    seen: dict[tuple[GroupKey, RowKey, int], Run] = {}
    lines = []
    for run in runs:
        key = (*keys_of(run.settings), run.config.seed)
        if seen.setdefault(key, run) is not run:
            lines.append(
                f"{run.path}: not in a table, because {seen[key].path} has the same settings and "
                "seed."
            )
    return lines


def _planned_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return resolve(settings).to_dict()
    except (TypeError, ValueError):  # a method that we lack has a row too
        common = {k: v for k, v in settings.items() if k not in ("target_macs", "target_params")}
        return {**resolve({**common, "method": "plain"}).to_dict(), "method": settings["method"]}


def _tell_apart(groups: Iterable[Group]) -> None:
    """Where titles are equal, add the settings that differ."""
    same: dict[str, list[Group]] = {}
    for group in groups:
        same.setdefault(group.title, []).append(group)
    for alike in same.values():
        apart = _differing(group.key.settings for group in alike)
        for group in alike:
            group.apart = apart
