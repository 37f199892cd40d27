"""One self-contained HTML page: no network, no other file, light and dark."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from selectconv import __version__
from selectconv.report.figures.plots import Figure
from selectconv.report.runs.collect import Run

_COLUMN_PT = 450  # figures that are wider take the whole width


@dataclass
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        blocks: HTML that takes the whole width, first.
        figures: drawn in a grid below.
    """

    title: str
    blocks: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Write the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        # An empty icon: else a browser asks the network for one.
        '<link rel="icon" href="data:,">',
        f"<style>{_read('page.css')}</style></head><body><main>",
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>',
        "<nav>",
        *(f'<a href="#s{n}">{escape(section.title)}</a>' for n, section in enumerate(sections)),
        "</nav>",
    ]
    for number, section in enumerate(sections):
        parts.append(f'<section id="s{number}"><h2>{escape(section.title)}</h2>')
        parts += section.blocks
        if section.figures:
            parts.append('<div class="figures">')
            parts += [_render_figure(figure) for figure in section.figures]
            parts.append("</div>")
        parts.append("</section>")
    parts.append(f'<p class="soft">Written by selectconv {__version__}.</p>')
    parts.append(f"</main><script>{_read('page.js')}</script></body></html>")
    return "\n".join(parts) + "\n"


def _read(name: str) -> str:
    return (files("selectconv.report") / name).read_text(encoding="utf-8")


def _render_figure(figure: Figure) -> str:
    body = figure.body or f'<p class="problem">{escape(figure.problem)}</p>'
    label = escape(figure.title)
    body = re.sub(r'(<svg role="img" aria-label=)"[^"]*"', rf'\1"{label}"', body, count=1)
    width = re.search(r'width="([\d.]+)pt"', body[:500])
    is_wide = 'class="slots"' in body or (width is not None and float(width[1]) > _COLUMN_PT)
    wide = ' class="wide"' if is_wide else ""
    caption = f"<b>{escape(figure.title)}.</b> {escape(figure.caption)}"
    return f"<figure{wide}>{body}<figcaption>{caption}</figcaption></figure>"


def render_runs(runs: Iterable[Run]) -> str:
    """Write the table of runs, with the command that repeats each."""
    head = ["run", "method", "seed", "error", "best", "seconds", "commit", "command"]
    rows = []
    for run in runs:
        commit = str(run.environment.get("commit") or "unknown")[:10]
        if run.environment.get("dirty"):
            commit += " + changes"
        cells = [
            run.name,
            run.config.method,
            str(run.config.seed),
            f"{run.error:.2f} %",
            f"{run.best_error:.2f} %",
            f"{run.seconds:,.0f}",
            commit,
        ]
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{text}<td><code>{escape(run.command)}</code></td></tr>")
    header = "".join(f'<th scope="col">{name}</th>' for name in head)
    return (
        '<div class="scroll"><table class="runs"><thead><tr>'
        f"{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def render_lines(lines: Iterable[str]) -> str:
    """Write lines as a list."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="problems">{items}</ul>'
