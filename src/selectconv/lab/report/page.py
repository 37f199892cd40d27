"""The report: from the runs to their tables and one self-contained page, light and dark."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from selectconv import __version__
from selectconv.files import write_text
from selectconv.lab.report import figures_of_methods as of_methods
from selectconv.lab.report import figures_of_run as of_run
from selectconv.lab.report.collect import Collection, Run
from selectconv.lab.report.compare import NO_GRID, Group, group_runs
from selectconv.lab.report.figure import Draw, Figure, draw_figure, render
from selectconv.lab.report.tables import ResultTable, build_table, write_csv
from selectconv.lab.reproduce.grid import Grid
from selectconv.lab.train.methods import METHODS
from selectconv.lab.train.run_folder import LAST

# The figures of a comparison, and those of its most telling run, by title.
OF_METHODS = {
    "Error by method": of_methods.draw_errors,
    "Paired differences by seed": of_methods.draw_pairs,
    "Test loss of the median runs": of_methods.draw_losses,
    "Slots that are shifted": of_methods.draw_shift_counts,
}
OF_RUN = {
    "The slots of a layer over the epochs": of_run.draw_history,
    "Where channels were de- and re-allocated": of_run.draw_map,
    "Learned shifts": of_run.draw_shifts,
    "A de-allocated channel and the one re-allocated in its place": of_run.draw_pair,
    "The channels most often de- and re-allocated": of_run.draw_top,
    "Distribution of hidden inputs": of_run.draw_inputs,
}


@dataclass(frozen=True)
class Report:
    """What a report consists of.

    Attributes:
        page: the page, as HTML.
        tables: one for each comparison.
        left_out: one line for each run or folder that is in no table, with the reason.
    """

    page: str
    tables: list[ResultTable]
    left_out: list[str]

    def write(self, folder: Path) -> list[Path]:
        """Write the page, and the tables as Markdown and CSV; returns the files."""
        contents = {
            "report.html": self.page,
            "tables.md": "\n".join(table.to_markdown() for table in self.tables),
            "tables.csv": write_csv(self.tables),
        }
        for name, text in contents.items():
            write_text(folder / name, text)
        return [folder / name for name in contents]


def build_report(
    found: Collection, grid: Grid = NO_GRID, problems: Mapping[str, str] | None = None
) -> Report:
    """Build the page and its tables.

    Args:
        found: the runs.
        grid: the runs that were planned, and how they are compared.
        problems: why planned runs are missing, by name.
    """
    groups = group_runs(found.runs, grid, problems)
    tables = [build_table(group) for group in groups]
    left_out = [f"{path}: {reason}" for path, reason in found.left_out.items()]
    left_out += [
        f"{run.path}: {row.runs[run.config.seed].path} has the same settings and seed."
        for row in (row for group in groups for row in group.rows)
        for run in row.unused
    ]
    style, script = (
        Markup((files("selectconv.lab.report") / name).read_text(encoding="utf-8"))
        for name in ("page.css", "page.js")
    )
    page = render(
        "page.html",
        grid=grid,
        tables=tables,
        groups={g.title: draw_group(g, f"g{n}") for n, g in enumerate(groups) if g.runs},
        runs=found.runs,
        left_out=left_out,
        style=style,
        script=script,
        version=__version__,
    )
    return Report(f"{page}\n", tables, left_out)


def draw_group(group: Group, name: str) -> list[Figure]:
    """Draw all figures of one comparison."""
    plans: list[tuple[str, str, Draw]] = []
    plans += [(title, group.title, partial(draw, group)) for title, draw in OF_METHODS.items()]
    run = choose_run(group)
    if run is not None:
        config = run.config
        subject = f"{config.model} on {config.data}, {config.method}, seed {config.seed} (n = 1)"
        plans += [(title, subject, partial(draw, run)) for title, draw in OF_RUN.items()]
    figures = [draw_figure(*plan, f"{name}-{number}") for number, plan in enumerate(plans)]
    return [figure for figure in figures if figure is not None]


def choose_run(group: Group) -> Run | None:
    """Choose the run to look at closely: the median one of the method that moves most."""
    methods = [name for name, method in METHODS.items() if "gamma" in method.uses]
    row = next((row for row in map(group.find, methods) if row.runs), None)
    if row is None:
        return None
    kept = [run for run in row.runs.values() if (run.path / LAST).exists()]
    return of_methods.median_run(kept or row.runs.values())
