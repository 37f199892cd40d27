"""Section 3.3's comparison of methods: errors, test losses, and how many slots are shifted."""

import math
from collections.abc import Sequence
from statistics import mean

from selectconv.core.models import selective_layers
from selectconv.lab.report.compare.groups import PAPERS_PLACEMENT, Group, Row
from selectconv.lab.report.figures.plots import COLOURS, GRID, INK, Figure, drawing, to_svg
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.train.network import build_model
from selectconv.lab.train.run_data import run_data


def draw_errors(group: Group, name: str) -> Figure:
    """Draw Figure 5: one box per method, one dot per seed."""
    rows = [row for row in group.rows.values() if row.runs]
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(rows), 3.4))
        for place, row in enumerate(rows):
            colour = row_colour(row)
            errors = list(row.measured("error").values())
            axes.boxplot(
                [errors],
                positions=[place],
                widths=0.5,
                showfliers=False,
                boxprops={"color": colour},
                whiskerprops={"color": colour},
                capprops={"color": colour},
                medianprops={"color": colour, "linewidth": 2},
            )
            spread = [place + 0.3 + 0.02 * (number % 5) for number in range(len(errors))]
            axes.plot(spread, errors, "o", color=colour, markersize=3, alpha=0.8)
        labels = [
            row.short_name.replace(" ", "\n")  # long names side by side
            for row in rows
        ]
        axes.set_xticks(range(len(rows)), labels)
        axes.set_ylabel(f"{group.endpoint} error, last epoch (%)")
        axes.grid(axis="y", linewidth=0.6)
        body = to_svg(figure, name)
    counts = ", ".join(f"{row.short_name} {len(row.runs)}" for row in rows)
    return Figure(
        f"{group.endpoint.capitalize()} error by method",
        f"{group.title}. The paper's Figure 5, with one dot per seed. Box: quartiles and median; "
        f"seeds: {counts}.",
        body,
    )


def draw_losses(group: Group, name: str) -> Figure:
    """Draw Figure 7: the test loss of each method's run of median error."""
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(6.2, 3.4))
        for row in group.rows.values():
            if not row.runs:
                continue
            run = median_run(list(row.runs.values()))
            losses = [line["test_loss"] for line in run.metrics]
            label = f"{row.short_name} (seed {run.config.seed})"
            axes.plot(losses, color=row_colour(row), label=label, linewidth=1.4)
        stop = math.ceil(group.config["stop_at"] * group.config["epochs"]) - 1
        axes.axvline(stop, color=GRID, linestyle="--", linewidth=1)
        axes.set_xlabel("epoch (dashed: the last epoch that selects channels)")
        axes.set_ylabel("test loss")
        axes.legend(fontsize=8)
        body = to_svg(figure, name)
    return Figure(
        "Test loss of the median runs",
        f"{group.title}. The paper's Figure 7: for each method, the run whose last test error is "
        "the median (for an even number, the better of the middle two).",
        body,
    )


def median_run(runs: Sequence[Run]) -> Run:
    """Return the run of median last error; for an even number, the better of the middle two."""
    return sorted(runs, key=lambda run: (run.error, run.config.seed))[(len(runs) - 1) // 2]


def draw_shift_counts(group: Group, name: str) -> Figure | None:
    """Draw how many slots are shifted by `select` against +S; None where one of them is missing."""
    shift, select = group.find("shift"), group.find("select")
    if shift is None or select is None:
        return None
    everywhere = count_shiftable(next(iter(shift.runs.values())))
    moved = [int(run.metrics[-1]["moved"]) for run in select.runs.values()]
    ratio = everywhere / mean(moved) if mean(moved) else float("inf")
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(5.2, 1.7))
        axes.barh([1], [everywhere], color=COLOURS["shift"], height=0.6)
        axes.barh([0], [mean(moved)], color=COLOURS["select"], height=0.6)
        axes.plot(moved, [0] * len(moved), "o", color=INK, markersize=3)
        axes.set_yticks([0, 1], ["select", "+S"])
        axes.set_xlabel("slots with a shift at the end (dots: seeds)")
        body = to_svg(figure, name)
    return Figure(
        "Slots that are shifted",
        f"{group.title}. +S shifts {everywhere} slots, select {mean(moved):.0f} on average over "
        f"{len(moved)} seeds: {ratio:.1f} times fewer. The paper (Section 3.3): about 5 times "
        "fewer.",
        body,
    )


def count_shiftable(run: Run) -> int:
    """Count the slots that +S shifts: those of every layer that may re-allocate."""
    model = build_model(run.config, run_data(run.path, run.config))
    layers = selective_layers(model).values()
    return sum(len(layer.gate) for layer in layers if layer.shift is not None)


def row_colour(row: Row) -> str:
    """Return a method's colour; another placement of it is drawn in ink."""
    return COLOURS.get(row.key.method, INK) if row.key.placement == PAPERS_PLACEMENT else INK
