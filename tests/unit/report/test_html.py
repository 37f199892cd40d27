"""What comes from runs is text on the page, whatever it looks like."""

import json
import re
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from selectconv.lab.report.compare.tables import HEADER, ResultTable
from selectconv.lab.report.figures.plots import Figure
from selectconv.lab.report.html import render
from selectconv.lab.report.page import Section, render_lines, render_page

HOSTILE = "</script></title>\"'><script>alert(1)</script>&amp;"


class Reader(HTMLParser):
    """Collects elements and text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.labels = [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.labels += [value for name, value in attributes if name == "aria-label"]

    def handle_data(self, data):
        self.text += data


def hostile_page(text):
    svg = Markup('<svg width="600pt"><g/></svg>')
    figures = [Figure(text, text, svg), Figure(text, text, problem=text)]
    table = ResultTable(text, text, [(text,) * len(HEADER)], [text])
    blocks = [table.to_html(), render_lines([text])]
    return render_page(text, text, [Section(text, blocks, figures)])


def test_text_stays_text():
    hostile, plain = Reader(hostile_page(HOSTILE)), Reader(hostile_page("harmless"))
    assert hostile.elements == plain.elements
    assert hostile.elements.count("script") == 1
    assert hostile.text.replace(HOSTILE, "harmless") == plain.text
    # Title, heading, lead; link and heading of the section; title, caption, finding and cells of
    # the table; the line; title and caption of each figure, and the problem of one.
    assert plain.text.count("harmless") == 3 + 2 + 3 + len(HEADER) + 1 + 2 * 2 + 1
    assert hostile.labels == [HOSTILE]


def test_data_in_a_script_cannot_end_it():
    layers = [{"name": HOSTILE, "states": ["0"], "source": [0]}]
    body = render("slots.html", name=HOSTILE, layers=layers)
    assert Reader(body).elements == Reader(render("slots.html", name="x", layers=[])).elements
    [data] = re.findall(r"<script[^>]*>(.*?)</script>", body)
    assert json.loads(data) == {"layers": layers}


def test_wide_figures_take_the_whole_width():
    widths = {"450": False, "450.5": True, "1200": True}
    for width, is_wide in widths.items():
        assert Figure("", "", Markup(f'<svg width="{width}pt">')).is_wide is is_wide
    assert Figure("", "", Markup('<div class="slots">')).is_wide
    assert not Figure("", "", problem="none").is_wide


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="'lines' is undefined"):
        render("lines.html")
