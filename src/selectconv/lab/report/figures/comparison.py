"""Methods side by side: paired by seed, against their cost, and in time."""

from statistics import median

from selectconv.lab.report.compare.groups import Group, Row
from selectconv.lab.report.figures.ablation import row_colour
from selectconv.lab.report.figures.plots import GRID, INK, Figure, drawing, to_svg
from selectconv.lab.report.runs.size import measure_size


def draw_pairs(group: Group, name: str) -> Figure | None:
    """Draw each seed's error minus the baseline's of the same seed; None: nothing is paired."""
    plain = group.baseline("error")
    if plain is None:
        return None
    before = plain.measured("error")
    pairs: list[tuple[Row, dict[int, float]]] = []
    for row in group.rows.values():
        found = row.measured("error")
        differences = {seed: found[seed] - before[seed] for seed in found if seed in before}
        if differences and not group.is_baseline(row):
            pairs.append((row, differences))
    if not pairs:
        return None
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(6.2, 1.1 + 0.55 * len(pairs)))
        axes.axvline(0, color=GRID, linewidth=1)
        for place, (row, differences) in enumerate(pairs):
            values = list(differences.values())
            colour = row_colour(row)
            axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, alpha=0.8)
            mean = sum(values) / len(values)
            axes.plot([mean, mean], [place - 0.3, place + 0.3], color=INK, linewidth=2)
        axes.set_yticks(range(len(pairs)), [row.short_name for row, _ in pairs])
        axes.set_ylim(-0.6, len(pairs) - 0.4)
        axes.invert_yaxis()
        axes.set_xlabel(f"{group.endpoint} error minus that of {plain.short_name} (points)")
        body = to_svg(figure, name)
    counts = ", ".join(f"{row.short_name} {len(differences)}" for row, differences in pairs)
    return Figure(
        "Paired differences by seed",
        f"{group.title}. One dot per seed; dots to the left of the line mean that the method is "
        f"better. The bar is their mean. Pairs: {counts}.",
        body,
    )


def draw_cost(group: Group, name: str) -> Figure | None:
    """Draw each run's accuracy against the multiply-adds of its network at the end."""
    points: list[tuple[Row, list[float], list[float]]] = []
    for row in group.rows.values():
        errors = row.measured("error")
        costs = {seed: measure_size(run) for seed, run in row.runs.items()}
        known = {seed: cost.macs / 1e6 for seed, cost in costs.items() if cost is not None}
        if known:
            points.append((row, list(known.values()), [100 - errors[seed] for seed in known]))
    if not points:
        return None
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(5.6, 3.4))
        for row, macs, accuracies in points:
            label = f"{row.short_name} ({len(macs)})"
            axes.plot(macs, accuracies, "o", color=row_colour(row), markersize=5, label=label)
        axes.set_xlabel("multiply-adds per image, without closed slots (millions)")
        axes.set_ylabel(f"{group.endpoint} accuracy (%)")
        axes.grid(linewidth=0.6)
        axes.legend(fontsize=8)
        body = to_svg(figure, name)
    return Figure(
        "Accuracy against multiply-adds",
        f"{group.title}. One dot per run, at its end; up and to the left is better.",
        body,
    )


def draw_times(group: Group, name: str) -> Figure | None:
    """Draw the seconds of each epoch: the median over a method's runs."""
    rows = [row for row in group.rows.values() if row.runs]
    if not rows:
        return None
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(6.2, 3.0))
        for row in rows:
            epochs = zip(*(run.metrics for run in row.runs.values()), strict=True)
            times = [median(float(line["seconds"]) for line in lines) for lines in epochs]
            label = f"{row.short_name} ({len(row.runs)})"
            axes.plot(times, color=row_colour(row), linewidth=1.4, label=label)
        axes.set_xlabel("epoch")
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        body = to_svg(figure, name)
    return Figure(
        "Time per epoch",
        f"{group.title}. Training, testing and the allocation step; medians over the runs (number "
        "of runs in brackets). This is wall time, so other work on the machine shows.",
        body,
    )
