"""Figures as SVG that take the colours of the page: one drawing for the light and the dark theme.

Ink, grid and paper are drawn in marker colours, which become CSS variables in the SVG's text.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from selectconv.errors import RunError
from selectconv.extras import needing
from selectconv.lab.train.methods import METHODS

_COLUMN_PT = 450  # figures that are wider take the whole width
INK, GRID, PAPER = "#010203", "#c0c1c2", "#fdfcfb"
_VARIABLES = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"}

COLOURS = {method.name: method.colour for method in METHODS.values()}


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        title: a few words.
        caption: what is seen, which figure of the paper it is, and how many runs it shows.
        body: HTML or SVG; empty where it could not be drawn.
        problem: why it could not be drawn.
    """

    title: str
    caption: str
    body: Markup = field(default_factory=Markup)
    problem: str = ""

    @property
    def is_wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        width = re.search(r'width="([\d.]+)pt"', self.body[:500])
        return 'class="slots"' in self.body or (width is not None and float(width[1]) > _COLUMN_PT)

    @property
    def html(self) -> Markup:
        """The body; an SVG is labelled with the title, for people who cannot see it."""
        if not self.body.startswith("<svg "):
            return self.body
        label = Markup('<svg role="img" aria-label="{}" ').format(self.title)
        return label + self.body[len("<svg ") :]


@contextmanager
def drawing() -> Iterator[Any]:
    """Lend matplotlib's pyplot, set up for the page; its settings are restored."""
    with needing("matplotlib", "A figure", error=RunError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    style: Any = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        try:
            yield pyplot
        finally:
            pyplot.close("all")


def to_svg(figure: Any, name: str) -> Markup:
    """Turn a figure of matplotlib into SVG for a page: themed, and with ids of its own."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Remove who made it and when, and a style that would apply to the whole page: page.css has it.
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", "", text, flags=re.S)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    return Markup(text)
