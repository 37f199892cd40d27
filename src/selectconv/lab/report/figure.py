"""Figures as SVG that take the colours of the page: one drawing for the light and the dark theme.

Ink, grid and paper are drawn in marker colours, which become CSS variables in the SVG's text.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from selectconv.errors import RunError, SelectConvError
from selectconv.extras import needing
from selectconv.lab.train.methods import METHODS

_COLUMN_INCHES = 6.25  # figures that are wider take the whole width
INK, GRID, PAPER = "#010203", "#c0c1c2", "#fdfcfb"
_VARIABLES = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"}
COLOURS = {method.name: method.colour for method in METHODS.values()}

Draw = Callable[[Any], tuple[Any, str] | None]


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        title: a few words.
        caption: what is seen, which figure of the paper it is, and how many runs it shows.
        body: HTML or SVG, or why it could not be drawn.
        is_wide: it takes the whole width of the page.
    """

    title: str
    caption: str
    body: Markup
    is_wide: bool = False


def draw_figure(title: str, subject: str, draw: Draw, name: str) -> Figure | None:
    """Draw a figure; if a run's files do not allow it, say why in its place.

    Args:
        title: a few words.
        subject: what it shows: the beginning of the caption.
        draw: given pyplot, it returns a figure of matplotlib (or HTML) and the rest of the caption.
            None: there is nothing to show, and no figure.
        name: unique on the page.
    """
    try:
        with drawing() as plt:
            result = draw(plt)
            if result is None:
                return None
            drawn, words = result
            if isinstance(drawn, Markup):
                return Figure(title, f"{subject}. {words}", drawn, is_wide=True)
            is_wide = drawn.get_figwidth() > _COLUMN_INCHES
            return Figure(title, f"{subject}. {words}", to_svg(drawn, name, title), is_wide)
    except (SelectConvError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        problem = Markup('<p class="problem">Not drawn: {}</p>').format(error)
        return Figure(title, f"{subject}.", problem)


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
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    with matplotlib.rc_context(style):
        try:
            yield pyplot
        finally:
            pyplot.close("all")


def to_svg(figure: Any, name: str, title: str) -> Markup:
    """Turn a figure of matplotlib into SVG for a page: labelled, themed, with ids of its own."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg ") + len("<svg ") :]
    # Remove who made it and when, and a style that would apply to the whole page: page.css has it.
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", "", text, flags=re.S)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    return Markup('<svg role="img" aria-label="{}" ').format(title) + Markup(text)
