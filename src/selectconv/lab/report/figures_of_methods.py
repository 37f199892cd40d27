"""Figures that set methods side by side: Section 3.3's, and pairs by seed.

Each function gets a comparison and pyplot, and returns a figure with its caption.
"""

import math
from collections.abc import Iterable
from itertools import cycle
from statistics import mean
from typing import Any

from selectconv.lab.report.collect import Run
from selectconv.lab.report.compare import Group, Row
from selectconv.lab.report.figure import COLOURS, GRID, INK
from selectconv.lab.report.statistics import half_interval


def draw_errors(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw Figure 5: one box per method, one dot per seed."""
    rows = [row for row in group.rows if row.runs]
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(rows), 3.4))
    for place, row in enumerate(rows):
        errors = list(row.measured("error").values())
        parts = ("boxprops", "whiskerprops", "capprops", "medianprops")
        look: dict[str, Any] = {part: {"color": row_colour(row)} for part in parts}
        axes.boxplot([errors], positions=[place], widths=0.5, showfliers=False, **look)
        axes.plot([place + 0.35] * len(errors), errors, "o", color=row_colour(row), markersize=3)
    axes.set_xticks(range(len(rows)), [row.name.replace(" ", "\n") for row in rows])
    axes.set_ylabel(f"{group.endpoint} error, last epoch (%)")
    counts = ", ".join(f"{row.name} {len(row.runs)}" for row in rows)
    return figure, f"The paper's Figure 5. Box: quartiles and median; one dot per seed: {counts}."


def draw_costs(group: Group, plt: Any, *, time: bool = False) -> tuple[Any, str] | None:
    """Draw each row's error against its deployed multiply-adds or time; None: that is unknown."""
    places = {
        row: mean(cost.macs for cost in costs) / 1e6
        for row, costs in ((row, row.costs("deployed")) for row in group.rows)
        if costs
    }
    words = "deployed multiply-adds (millions)"
    if time:
        timed = {row: [run.time["ms"] for run in row.runs.values() if run.time] for row in places}
        places = {row: mean(own) for row, own in timed.items() if own}
        words = "time in ONNX Runtime, one thread (ms a batch)"
    if not places:
        return None
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for marker, (row, place) in zip(cycle("osD^vPX*"), places.items(), strict=False):
        errors = list(row.measured("error").values())
        look = {"color": row_colour(row), "marker": marker, "capsize": 3, "label": row.name}
        axes.errorbar(place, mean(errors), half_interval(errors), linestyle="", **look)
    axes.set(xlabel=words, ylabel=f"{group.endpoint} error, last epoch (%)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1 + (len(places) > 4))
    return figure, "Mean error of each row with its 95 % interval; lower left is better."


def draw_losses(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw Figure 7: the test loss of each method's run of median error."""
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for row in [row for row in group.rows if row.runs]:
        run = median_run(row.runs.values())
        losses = [line["test_loss"] for line in run.metrics]
        axes.plot(losses, color=row_colour(row), label=f"{row.name} (seed {run.config.seed})")
    stop = math.ceil(group.config["stop_at"] * group.config["epochs"]) - 1
    axes.axvline(stop, color=GRID, linestyle="--", linewidth=1)
    axes.set(xlabel="epoch (dashed: the last epoch that selects channels)", ylabel="test loss")
    axes.legend()
    return figure, "The paper's Figure 7: for each method, the run of median last test error."


def median_run(runs: Iterable[Run]) -> Run:
    """Return the run of median last error; for an even number, the better of the middle two."""
    ordered = sorted(runs, key=lambda run: (run.error, run.config.seed))
    return ordered[(len(ordered) - 1) // 2]


def draw_shift_counts(group: Group, plt: Any) -> tuple[Any, str] | None:
    """Draw how many slots are shifted by `select` against +S; None where one of them is missing."""
    shift, select = group.find("shift"), group.find("select")
    if not shift.runs or not select.runs:
        return None
    layers = next(iter(shift.runs.values())).layers
    everywhere = sum(len(layer.source) for layer in layers if layer.can_shift)
    moved = [int(run.metrics[-1]["moved"]) for run in select.runs.values()]
    figure, axes = plt.subplots(figsize=(5.2, 1.7))
    colours = [COLOURS["select"], COLOURS["shift"]]
    axes.barh(["select", "+S"], [mean(moved), everywhere], color=colours, height=0.6)
    axes.plot(moved, ["select"] * len(moved), "o", color=INK, markersize=3)
    axes.set_xlabel("slots with a shift at the end (dots: seeds)")
    ratio = everywhere / mean(moved) if any(moved) else math.inf
    return figure, (
        f"+S shifts {everywhere} slots, select {mean(moved):.0f} on average over {len(moved)} "
        f"seeds: {ratio:.1f} times fewer. The paper (Section 3.3): about 5 times fewer."
    )


def row_colour(row: Row) -> str:
    """Return a method's colour; with a setting that is gone it is drawn in ink."""
    return INK if row.gone else COLOURS[row.method]
