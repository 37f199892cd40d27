"""The report in a real browser: no script error, every figure has a size, in both themes."""

import io
import shutil

import pytest
from PIL import Image

from browser import CHROMIUM, Browser
from fake_runs import write_run
from selectconv.lab.cli.main import main

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: apt install chromium"
)

WIDE, NARROW = 1200, 390


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for seed in range(2):
        for method in ("plain", "select", "shift"):
            error = {"plain": 20.0, "select": 18.0, "shift": 19.0}[method] + seed
            name = f"{method}-{seed}"
            write_run(
                folder / "runs" / name, method=method, seed=seed, error=error,
                weights=method == "select",
            )  # fmt: skip
    assert main(["report", str(folder / "runs"), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    profile = tmp_path_factory.mktemp("chromium")
    browser = Browser(profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.mark.parametrize(
    ("width", "dark"),
    [(WIDE, False), (WIDE, True), (NARROW, False)],
    ids=["light", "dark", "narrow"],
)
def test_the_page_works(browser, page, tmp_path, width, dark):
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.errors() == []
    # Nothing but the page itself is asked for (data: addresses are in it).
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]
    sizes = browser.evaluate(
        "[...document.querySelectorAll('figure')].map(f => {"
        " const b = (f.querySelector('svg, table') || f).getBoundingClientRect();"
        " return [b.width, b.height]; })"
    )
    assert len(sizes) >= 9
    assert all(w > 60 and h > 30 for w, h in sizes), sizes
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    shown = browser.screenshot(tmp_path / "page.png")
    picture = Image.open(io.BytesIO(shown)).convert("L")
    corner = picture.getpixel((2, 2))
    assert corner < 60 if dark else corner > 200
    assert sum(count > 0 for count in picture.histogram()) > 20  # not an empty sheet


def test_pointing_at_a_layer_shows_its_slots(browser, page):
    browser.open(page.as_uri(), width=WIDE)
    script = """(() => {
      const root = document.querySelector('.slots');
      const buttons = [...root.querySelectorAll('.layers button')];
      return buttons.map(b => {
        b.dispatchEvent(new PointerEvent('pointerenter'));
        return [b.textContent, root.querySelector('.which').textContent,
                root.querySelectorAll('svg.grid rect').length];
      });
    })()"""
    shown = browser.evaluate(script)
    assert len(shown) == 8  # two blocks of two units of two convs
    for name, text, cells in shown:
        slots = int(name.rpartition("/")[2])
        layer = text.partition(":")[0]
        assert name.startswith(layer)
        assert f"{slots} slots" in text
        assert cells == 6 * slots  # one cell per epoch
    assert browser.errors() == []
