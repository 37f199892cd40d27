"""The documentation site builds strictly, and a browser needs no network for it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser

pytest.importorskip("mkdocs", reason="the site needs the dev extra")
pytest.importorskip("mkdocstrings", reason="the site needs the dev extra")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr  # strict: a broken link or anchor is an error
    return folder


@pytest.mark.timeout(1000)
def test_every_page_is_there(site):
    names = {page.name for page in site.glob("*.html")}
    for name in ("index", "start", "better", "settings", "reference", "changelog", "results"):
        assert f"{name}.html" in names


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"', text)
        loaded += re.findall(
            r'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="(https?:[^"]+)"', text
        )
        assert loaded == [], page.name


def test_the_reference_shows_examples_as_code(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    for name in ("convert", "ChannelAllocator", "compress", "shift2d"):
        assert name in text
    assert "&gt;&gt;&gt;" in text
    assert "<blockquote>" not in text


def test_the_search_knows_the_pages(site):
    text = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "expected channel damage matrix" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (400, True)])
def test_search_works_from_a_folder(site, tmp_path, width, dark):
    browser = Browser(tmp_path)
    try:
        browser.open((site / "settings.html").as_uri(), width=width, dark=dark)
        scheme = browser.evaluate("document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default")
        browser.evaluate(
            "(() => { const query = document.querySelector('[data-md-component=search-query]');"
            "query.focus(); query.value = 'damage matrix';"
            "query.dispatchEvent(new Event('keyup', {bubbles: true})); })()"
        )
        deadline = time.monotonic() + 60
        found = "document.querySelectorAll('.md-search-result__item').length"
        while not browser.evaluate(found):
            assert time.monotonic() < deadline, browser.errors()
            time.sleep(0.2)
        assert browser.errors() == []
        assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
        # On a narrow page the search slides in: it is wider while it moves.
        while browser.evaluate("document.documentElement.scrollWidth") > width:
            assert time.monotonic() < deadline, "the page must not scroll sideways"
    finally:
        browser.close()
