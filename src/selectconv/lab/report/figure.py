"""Figures as SVG that take the colours of the page: one drawing for the light and the dark theme.

Ink and grid are drawn in marker colours, which become CSS variables in the SVG's text.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from selectconv.errors import RunError, SelectConvError
from selectconv.extras import needing
from selectconv.lab.train.methods import METHODS

_COLUMN_INCHES = 6.25  # figures that are wider take the whole width
INK, GRID = "#010203", "#c0c1c2"
_VARIABLES = {INK: "currentColor", GRID: "var(--grid)"}
COLOURS = {method.name: method.colour for method in METHODS.values()}
# In a file of its own, a figure has no page to take its colours from.
_ALONE = (
    "<style>svg { color: #1f2328; --grid: #c9cfd8 } @media (prefers-color-scheme: dark) "
    "{ svg { color: #f0f6fc; --grid: #3a4452 } }</style>"
)
_STYLE = {
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
_TEMPLATES = Environment(
    loader=PackageLoader("selectconv.lab.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# Given pyplot, it returns a figure of matplotlib, or HTML, and what to say about it; or None.
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

    @property
    def alone(self) -> str:
        """Its SVG, for a file of its own."""
        return str(self.body).replace(">", f">{_ALONE}", 1) + "\n"


def draw_figure(title: str, subject: str, draw: Draw, name: str) -> Figure | None:
    """Draw a figure; if a run's files do not allow it, say why in its place.

    Args:
        title: a few words.
        subject: what it shows: the beginning of the caption.
        draw: what draws it; None: there is nothing to show.
        name: unique on the page.
    """
    try:
        with drawing(name) as plt:
            figure, words = draw(plt) or (None, "")
            if figure is None:
                return None
            is_html = isinstance(figure, Markup)
            is_wide = is_html or figure.get_figwidth() > _COLUMN_INCHES
            body = figure if is_html else to_svg(figure, name, title)
    except (SelectConvError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        body, words, is_wide = Markup('<p class="problem">{}</p>').format(error), "Not drawn", False
    return Figure(title, f"{subject}. {words}", body, is_wide)


@contextmanager
def drawing(name: str) -> Iterator[Any]:
    """Lend matplotlib's pyplot, set up for a figure of the page; its settings are restored."""
    with needing("matplotlib", "A figure", error=RunError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        yield pyplot
        pyplot.close("all")


def to_svg(figure: Any, name: str, title: str) -> Markup:
    """Turn a figure of matplotlib into SVG for a page: labelled, themed, with ids of its own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    _, _, text = buffer.getvalue().partition("<svg ")
    # Remove who made it and when, and a style that would apply to the whole page: page.css has it.
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", "", text, flags=re.S)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    return Markup('<svg role="img" aria-label="{}" ').format(title) + Markup(text)


def render(template: str, **values: Any) -> Markup:
    """Fill a file of `templates/`; what is not marked as HTML is escaped."""
    return Markup(_TEMPLATES.get_template(template).render(values))
