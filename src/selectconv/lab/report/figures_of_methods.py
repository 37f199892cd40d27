"""Figures that set methods side by side: Section 3.3's, pairs by seed, and cost.

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
        colours = {part: {"color": row_colour(row)} for part in parts}
        axes.boxplot([errors], positions=[place], widths=0.5, showfliers=False, **colours)
        spread = [place + 0.3 + 0.02 * (number % 5) for number in range(len(errors))]
        axes.plot(spread, errors, "o", color=row_colour(row), markersize=3, alpha=0.8)
    axes.set_xticks(range(len(rows)), [row.short_name.replace(" ", "\n") for row in rows])
    axes.set_ylabel(f"{group.endpoint} error, last epoch (%)")
    axes.grid(axis="y")
    counts = ", ".join(f"{row.short_name} {len(row.runs)}" for row in rows)
    return figure, f"The paper's Figure 5. Box: quartiles and median; one dot per seed: {counts}."


def draw_losses(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw Figure 7: the test loss of each method's run of median error."""
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for row in group.rows:
        if row.runs:
            run = median_run(row.runs.values())
            losses = [line["test_loss"] for line in run.metrics]
            label = f"{row.short_name} (seed {run.config.seed})"
            axes.plot(losses, color=row_colour(row), label=label, linewidth=1.4)
    stop = math.ceil(group.config["stop_at"] * group.config["epochs"]) - 1
    axes.axvline(stop, color=GRID, linestyle="--", linewidth=1)
    axes.set_xlabel("epoch (dashed: the last epoch that selects channels)")
    axes.set_ylabel("test loss")
    axes.legend()
    return figure, "The paper's Figure 7: for each method, the run of median last test error."


def median_run(runs: Iterable[Run]) -> Run:
    """Return the run of median last error; for an even number, the better of the middle two."""
    ordered = sorted(runs, key=lambda run: (run.error, run.config.seed))
    return ordered[(len(ordered) - 1) // 2]


def draw_shift_counts(group: Group, plt: Any) -> tuple[Any, str] | None:
    """Draw how many slots are shifted by `select` against +S; None where one of them is missing."""
    shift, select = group.find("shift"), group.find("select")
    if shift is None or select is None:
        return None
    layers = next(iter(shift.runs.values())).layers
    everywhere = sum(len(layer.last) for layer in layers if layer.can_shift)
    moved = [int(run.metrics[-1]["moved"]) for run in select.runs.values()]
    figure, axes = plt.subplots(figsize=(5.2, 1.7))
    axes.barh([1], [everywhere], color=COLOURS["shift"], height=0.6)
    axes.barh([0], [mean(moved)], color=COLOURS["select"], height=0.6)
    axes.plot(moved, [0] * len(moved), "o", color=INK, markersize=3)
    axes.set_yticks([0, 1], ["select", "+S"])
    axes.set_xlabel("slots with a shift at the end (dots: seeds)")
    ratio = everywhere / mean(moved) if mean(moved) else math.inf
    return figure, (
        f"+S shifts {everywhere} slots, select {mean(moved):.0f} on average over {len(moved)} "
        f"seeds: {ratio:.1f} times fewer. The paper (Section 3.3): about 5 times fewer."
    )


def draw_pairs(group: Group, plt: Any) -> tuple[Any, str] | None:
    """Draw each seed's error minus the baseline's of the same seed; None: nothing is paired."""
    plain = group.baseline("error")
    before = {} if plain is None else plain.measured("error")
    pairs = []
    for row in group.rows:
        after = row.measured("error")
        differences = [after[seed] - before[seed] for seed in after if seed in before]
        if differences and row not in group.baselines:
            pairs.append((row, differences))
    if plain is None or not pairs:
        return None
    figure, axes = plt.subplots(figsize=(6.2, 1.1 + 0.55 * len(pairs)))
    axes.axvline(0, color=GRID, linewidth=1)
    for place, (row, values) in enumerate(pairs):
        dots = {"color": row_colour(row), "markersize": 4, "alpha": 0.8}
        axes.plot(values, [place] * len(values), "o", **dots)
        axes.plot([mean(values)] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=2)
    axes.set_yticks(range(len(pairs)), [row.short_name for row, _ in pairs])
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlabel(f"{group.endpoint} error minus that of {plain.short_name} (points)")
    counts = ", ".join(f"{row.short_name} {len(values)}" for row, values in pairs)
    return figure, f"One dot per seed; left of the line is better; bar: the mean. Pairs: {counts}."


def draw_cost(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw each run's accuracy against the multiply-adds of its network at the end."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for row in group.rows:
        errors = row.measured("error")
        sizes = {seed: run.size for seed, run in row.runs.items() if run.size is not None}
        macs = [size.macs / 1e6 for size in sizes.values()]
        accuracies = [100 - errors[seed] for seed in sizes]
        label = f"{row.short_name} ({len(macs)})"
        axes.plot(macs, accuracies, "o", color=row_colour(row), markersize=5, label=label)
    axes.set_xlabel("multiply-adds per image, without closed slots (millions)")
    axes.set_ylabel(f"{group.endpoint} accuracy (%)")
    axes.grid()
    axes.legend()
    return figure, "One dot per run, at its end; up and to the left is better."


def row_colour(row: Row) -> str:
    """Return a method's colour; with a setting that is gone it is drawn in ink."""
    return INK if row.gone else COLOURS[row.method]
