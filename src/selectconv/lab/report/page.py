"""One self-contained HTML page: no network, no other file, light and dark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from markupsafe import Markup

from selectconv import __version__
from selectconv.lab.report.figures.plots import Figure
from selectconv.lab.report.html import render
from selectconv.lab.report.runs.collect import Run

_RUN_HEADER = ("run", "method", "seed", "error", "best", "seconds", "commit", "command")


@dataclass
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        blocks: HTML that takes the whole width, first.
        figures: drawn in a grid below.
    """

    title: str
    blocks: list[Markup] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Write the page."""
    page = render(
        "page.html",
        title=title,
        lead=lead,
        sections=sections,
        css=_read("page.css"),
        script=_read("page.js"),
        version=__version__,
    )
    return f"{page}\n"


def _read(name: str) -> Markup:
    return Markup((files("selectconv.lab.report") / name).read_text(encoding="utf-8"))


def render_runs(runs: Iterable[Run]) -> Markup:
    """Write the table of runs, with the command that repeats each."""
    rows = []
    for run in runs:
        commit = str(run.environment.get("commit") or "unknown")[:10]
        if run.environment.get("dirty"):
            commit += " + changes"
        cells = (
            run.name,
            run.config.method,
            run.config.seed,
            f"{run.error:.2f} %",
            f"{run.best_error:.2f} %",
            f"{run.seconds:,.0f}",
            commit,
        )
        rows.append((cells, run.command))
    return render("runs.html", header=_RUN_HEADER, rows=rows)


def render_lines(lines: Iterable[str]) -> Markup:
    """Write lines as a list."""
    return render("lines.html", lines=lines)
