"""What the documentation says is run: code blocks, links, names; commands: test_doc_commands."""

import re
from pathlib import Path

import pytest

import selectconv as sc
from scripts import load_script

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("[bdrs]*/*.md"))]
STORY = ROOT / "docs" / "start.md"  # one story: its blocks need each other
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page != STORY
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
MAIN_EXAMPLE = BLOCKS[0].values[0]  # the README's


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block, capsys):
    # An error or a failed assert inside the block fails the test.
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    shown = capsys.readouterr()
    assert "Error" not in shown.err
    if block is MAIN_EXAMPLE:
        assert_something_happens(shown.out)


def without_figures(text):
    """The words of an output; figures may differ in their last digits from machine to machine."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d,.]*(e-?\d+)?|;.*", "#", text))


@pytest.mark.timeout(600)
def test_the_tutorial_runs_and_says_what_the_page_says(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    tutorial, text = load_script("docs/tutorial/make_start.py"), STORY.read_text()
    printed = tutorial.run_page(text)
    for said, shown in zip(printed, tutorial.outputs(text), strict=True):
        assert shown is None or without_figures(said) == without_figures(shown)
    assert (tmp_path / "small.onnx").exists()


def assert_something_happens(out):
    steps = re.findall(r"(\d+) slots? de-allocated, (\d+) re-allocated", out)
    assert len(steps) == 4
    assert sum(int(closed) > 0 and int(opened) > 0 for closed, opened in steps) >= 2
    assert out.count("no step, since stop_at has passed") == 4


def test_the_docs_stay_short():
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 12_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    local = [link.split("#")[0] for link in links if not link.startswith(("http", "#"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_public_name_is_in_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in sc.__all__ if f"`sc.{name}`" not in page]
    missing += [name for name in sc.functional.__all__ if f"`{name}`" not in page]
    assert missing == []


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_starts_with_the_two_commands(command):
    assert command in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])


def test_version_is_the_same_wherever_it_stands():
    assert f'version = "{sc.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {sc.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_promises_of_the_security_page_are_tested():
    page = (ROOT / "docs" / "reliability.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in tests] == []
    promised = page.split("### Promised")[1].split("### Not promised")[0]
    assert all("`test_" in promise for promise in promised.split("\n- ")[1:])
