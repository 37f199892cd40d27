"""Figures that set methods side by side: Section 3.3's, and pairs by seed.

Each function gets a comparison and pyplot, and returns a figure with its caption.
"""

import math
from collections.abc import Iterable
from statistics import mean
from typing import Any

from selectconv.lab.report.collect import Run
from selectconv.lab.report.compare import Group, Row
from selectconv.lab.report.figure import COLOURS, GRID, INK


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


def draw_pairs(group: Group, plt: Any) -> tuple[Any, str] | None:
    """Draw each seed's error minus the baseline's of the same seed; None: nothing is paired."""
    plain = group.baseline("error")
    before = plain.measured("error")
    pairs = {
        row.name: [error - before[seed] for seed, error in after.items() if seed in before]
        for row, after in ((row, row.measured("error")) for row in group.asked)
    }
    pairs = {name: values for name, values in pairs.items() if values}
    if not pairs:
        return None
    figure, axes = plt.subplots(figsize=(6.2, 1.1 + 0.55 * len(pairs)))
    axes.axvline(0, color=GRID, linewidth=1)
    for name, values in reversed(pairs.items()):
        axes.plot(values, [name] * len(values), "o", color=COLOURS["select"], alpha=0.8)
        axes.plot(mean(values), name, "|", color=INK, markersize=18, markeredgewidth=2)
    axes.set_ymargin(0.2)
    axes.set_xlabel(f"{group.endpoint} error minus that of {plain.name} (points)")
    counts = ", ".join(f"{name} {len(values)}" for name, values in pairs.items())
    return figure, f"One dot per seed; left of the line is better; bar: the mean. Pairs: {counts}."


def row_colour(row: Row) -> str:
    """Return a method's colour; with a setting that is gone it is drawn in ink."""
    return INK if row.gone else COLOURS[row.method]
