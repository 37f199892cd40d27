"""Build the report: from the runs to the page and its tables."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from selectconv.errors import SelectConvError
from selectconv.files import write_text
from selectconv.lab.report.compare.groups import (
    FIRST,
    Group,
    find_duplicates,
    group_runs,
)
from selectconv.lab.report.compare.tables import ResultTable, build_table, write_csv
from selectconv.lab.report.figures.ablation import (
    draw_errors,
    draw_losses,
    draw_shift_counts,
    median_run,
)
from selectconv.lab.report.figures.allocation import describe, draw_history, draw_map, draw_shifts
from selectconv.lab.report.figures.comparison import draw_cost, draw_pairs, draw_times
from selectconv.lab.report.figures.damage import draw_damage
from selectconv.lab.report.figures.feature import draw_pair, draw_top
from selectconv.lab.report.figures.input import draw_inputs
from selectconv.lab.report.figures.plots import Figure
from selectconv.lab.report.page import Section, render_lines, render_page, render_runs
from selectconv.lab.report.runs.collect import Collection, Run
from selectconv.lab.report.runs.trained import load_trained
from selectconv.lab.train.methods import METHODS

_NUM_IMAGES = 512  # test images for the histograms of hidden inputs
_LEAD = (
    "Runs of selectconv, which implements Training CNNs with Selective Allocation of Channels "
    "(Jeong and Shin, ICML 2019). Every number comes from the runs' own files."
)

Missing = Iterable[tuple[str, Mapping[str, Any], str]]


def build_report(
    found: Collection,
    *,
    title: str = "selectconv: report of runs",
    note: str = "",
    table: str = "table1",
    scale: str = "",
    test: str = "",
    missing: Missing = (),
    first: tuple[str, ...] = FIRST,
    margin: float | None = None,
) -> tuple[str, list[ResultTable]]:
    """Build the page and its tables.

    Args:
        found: the runs.
        title: of the page.
        note: what to know about the scale.
        table: which of the paper's tables to quote beside the runs.
        scale: of the grid; empty for runs that belong to none.
        test: the statistical test that was named before the runs.
        missing: name, settings and reason of planned runs that are not finished.
        first: the methods of the test's first question.
        margin: points of error within which a method counts as no worse; None: not tested.
    """
    groups = group_runs(found.runs, missing, first, margin)
    tables = [build_table(group, table=table, scale=scale, test=test) for group in groups]
    sections = [Section("Results", [result.to_html() for result in tables])]
    for number, group in enumerate(groups):
        runs = [run for row in group.rows.values() for run in row.runs.values()]
        if runs:
            sections.append(Section(group.title, [], draw_group(group, f"g{number}")))
    sections.append(Section("Runs, and how to repeat them", [render_runs(found.runs)]))
    if found.left_out:
        sections.append(Section("Left out", [render_lines(found.left_out)]))
    notes = [*found.notes, *find_duplicates(found.runs)]
    if notes:
        sections.append(Section("Notes", [render_lines(notes)]))
    return render_page(title, " ".join([_LEAD, note]).strip(), sections), tables


def draw_group(group: Group, name: str) -> list[Figure]:
    """Draw all figures of one comparison."""
    run = choose_run(group)
    plans: list[tuple[str, Callable[[], Figure | None]]] = []
    if len([row for row in group.rows.values() if row.runs]) > 1:
        plans.append(("Error by method", lambda: draw_errors(group, f"{name}-errors")))
        plans.append(("Paired differences", lambda: draw_pairs(group, f"{name}-pairs")))
        plans.append(("Accuracy and cost", lambda: draw_cost(group, f"{name}-cost")))
    plans.append(("Test loss", lambda: draw_losses(group, f"{name}-losses")))
    plans.append(("Time per epoch", lambda: draw_times(group, f"{name}-times")))
    plans.append(("Slots that are shifted", lambda: draw_shift_counts(group, f"{name}-counts")))
    if run is not None:
        plans += _plan_close_look(run, name)
    figures = [_draw(title, draw, run) for title, draw in plans]
    return [figure for figure in figures if figure is not None]


def _plan_close_look(run: Run, name: str) -> list[tuple[str, Callable[[], Figure | None]]]:
    """List the figures of one run, each with the title it has where it cannot be drawn."""
    plans: list[tuple[str, Callable[[], Figure | None]]] = [
        ("The slots of a layer", lambda: draw_history(run, f"{name}-history")),
        ("Where channels were de- and re-allocated", lambda: draw_map(run, f"{name}-map")),
    ]
    trained = load_trained(run, _NUM_IMAGES)
    if isinstance(trained, str):
        names = "learned shifts, feature maps, damage, distribution of hidden inputs"
        missing = Figure(f"Not drawn: {names}", describe(run), problem=trained)
        return [*plans, ("", lambda: missing)]
    plans.append(("Learned shifts", lambda: draw_shifts(run, trained.model, f"{name}-shifts")))
    plans.append(("A de-allocated channel", lambda: draw_pair(run, trained, f"{name}-pair")))
    plans.append(("Channels most often moved", lambda: draw_top(run, trained, f"{name}-top")))
    plans.append(("Damage", lambda: draw_damage(run, trained, f"{name}-damage")))
    plans.append(("Hidden inputs", lambda: draw_inputs(run, trained, f"{name}-inputs")))
    return plans


def _draw(title: str, draw: Callable[[], Figure | None], run: Run | None) -> Figure | None:
    """Draw a figure; if a run's files do not allow it, say why in its place."""
    try:
        return draw()
    except (SelectConvError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        caption = "" if run is None else describe(run)
        reason = " ".join(str(error).split())
        return Figure(f"Not drawn: {title}", caption, problem=f"It could not be drawn: {reason}")


def choose_run(group: Group) -> Run | None:
    """Choose the run to look at closely: the median one of the method that moves most."""
    allocating = [method.name for method in METHODS.values() if "gamma" in method.uses]
    for name in allocating:
        row = group.find(name)
        if row is not None:
            runs = list(row.runs.values())
            with_weights = [run for run in runs if run.weights is not None]
            return median_run(with_weights or runs)
    return None


def write_results(folder: Path, page: str, tables: list[ResultTable]) -> list[Path]:
    """Write the page, and the tables as Markdown, CSV and HTML; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.html": page,
        "tables.md": "\n".join(result.to_markdown() for result in tables),
        "tables.csv": write_csv(tables),
        "tables.html": "\n".join(result.to_html() for result in tables) + "\n",
    }
    for name, text in contents.items():
        write_text(folder / name, text)
    return [folder / name for name in contents]
