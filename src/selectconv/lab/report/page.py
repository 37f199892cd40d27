"""The report: from the runs to their tables and one self-contained page, light and dark."""

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup

from selectconv import __version__
from selectconv.core.threads import num_threads
from selectconv.files import write_text
from selectconv.lab.bench.timing import in_turn, open_network, ratios, row
from selectconv.lab.report import figures
from selectconv.lab.report.collect import Collection, Run, rebuild
from selectconv.lab.report.compare import NO_GRID, Group, group_runs
from selectconv.lab.report.figure import Draw, Figure, draw_figure, render
from selectconv.lab.report.tables import ResultTable, build_table, write_csv
from selectconv.lab.reproduce.grid import Grid
from selectconv.lab.train.config import as_file_name
from selectconv.lab.train.methods import METHODS
from selectconv.lab.train.network import run_data
from selectconv.lab.train.run_folder import LAST, TIME

_BATCH, _REPEATS = 16, 15  # images of a call that is timed, turns of each network
# The figures of a comparison, and those of its most telling run, by title.
OF_METHODS: dict[str, Callable[..., Any]] = {
    "Error by method": figures.draw_errors,
    "Error against deployed multiply-adds": figures.draw_costs,
    "Error against time": partial(figures.draw_costs, time=True),
    "Test loss of the median runs": figures.draw_losses,
    "Slots that are shifted": figures.draw_shift_counts,
}
OF_RUN = {
    "The slots of a layer over the epochs": figures.draw_history,
    "Where channels were de- and re-allocated": figures.draw_map,
    "Learned shifts": figures.draw_shifts,
    "A de-allocated channel and the one re-allocated in its place": figures.draw_pair,
    "The channels most often de- and re-allocated": figures.draw_top,
    "Distribution of hidden inputs": figures.draw_inputs,
}


@dataclass(frozen=True)
class Report:
    """What a report consists of.

    Attributes:
        page: the page, as HTML.
        tables: one for each comparison.
        left_out: one line for each run or folder that is in no table, with the reason.
        figures: those of the page that are drawings, as SVG, by file name.
    """

    page: str
    tables: list[ResultTable]
    left_out: list[str]
    figures: dict[str, str]

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
    found: Collection,
    grid: Grid = NO_GRID,
    problems: Mapping[str, str] | None = None,
    *,
    time: bool = False,
) -> Report:
    """Build the page and its tables.

    Args:
        found: the runs.
        grid: the runs that were planned, and how they are compared.
        problems: why planned runs are missing, by name.
        time: measure the deployed networks, and write down how long they take.
    """
    groups = group_runs(found.runs, grid, problems)
    for group in groups if time else ():
        time_networks(group)
    tables = [build_table(group) for group in groups]
    left_out = [f"{path}: {reason}" for path, reason in found.left_out.items()]
    left_out += [
        f"{run.path}: {row.runs[run.config.seed].path} has the same settings and seed."
        for row in (row for group in groups for row in group.rows)
        for run in row.unused
    ]
    drawn = {g.title: draw_group(g, f"g{n}") for n, g in enumerate(groups) if g.runs}
    drawings = {
        as_file_name(f"{number}-{figure.title}.svg").lower(): figure.alone
        for number, some in enumerate(drawn.values())
        for figure in some
        if figure.body.startswith("<svg")
    }
    style, script = (
        Markup((files("selectconv.lab.report") / name).read_text(encoding="utf-8"))
        for name in ("page.css", "page.js")
    )
    page = render(
        "page.html",
        grid=grid,
        tables=tables,
        groups=drawn,
        runs=found.runs,
        left_out=left_out,
        style=style,
        script=script,
        version=__version__,
    )
    return Report(f"{page}\n", tables, left_out, drawings)


def time_networks(group: Group) -> None:
    """Time the network of each row's median run in ONNX Runtime, on one thread and in turn.

    The runs' folders get the median of the ratios to the first row's time; older measurements go.
    Weights do not matter to it, so they may be missing; a slimmed network needs them.
    """
    rows = [[run for run in row.runs.values() if run.deployed is not None] for row in group.rows]
    chosen = {run.name: run for run in map(figures.median_run, filter(None, rows))}
    sides = {}
    with num_threads(1):
        for name, run in chosen.items():
            network, _ = rebuild(run.path, run.config, run.metrics)
            images = torch.zeros(_BATCH, *run_data(run.path, run.config).shape)
            sides[name] = partial(open_network(network.eval(), images, "onnxruntime"), images)
        times = in_turn(sides, _REPEATS)
        for run in group.runs:  # another one may have been the median run before
            run.time.clear()
            (run.path / TIME).unlink(missing_ok=True)
        for name, run in chosen.items():
            over, own = next(iter(chosen)), times[name]
            run.time.update(row("ONNX Runtime", name, ratios(own, times[over]), "x"))
            run.time.update(over=over, batch=_BATCH, ms=1e3 * statistics.median(own))
            write_text(run.path / TIME, json.dumps(run.time, indent=1) + "\n")


def draw_group(group: Group, name: str) -> list[Figure]:
    """Draw all figures of one comparison."""
    plans: list[tuple[str, str, Draw]] = [
        (title, group.title, partial(draw, group)) for title, draw in OF_METHODS.items()
    ]
    run = choose_run(group)
    if run is not None:
        config = run.config
        subject = f"{config.model} on {config.data}, {config.method}, seed {config.seed} (n = 1)"
        plans += [(title, subject, partial(draw, run)) for title, draw in OF_RUN.items()]
    made = [draw_figure(*plan, f"{name}-{number}") for number, plan in enumerate(plans)]
    return [figure for figure in made if figure is not None]


def choose_run(group: Group) -> Run | None:
    """Choose the run to look at closely: the median one of the method that moves most."""
    methods = [name for name, method in METHODS.items() if "gamma" in method.uses]
    row = next((row for row in map(group.find, methods) if row.runs), None)
    if row is None:
        return None
    kept = [run for run in row.runs.values() if (run.path / LAST).exists()]
    return figures.median_run(kept or row.runs.values())
