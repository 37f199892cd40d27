"""The notebook runs from top to bottom, and what its cells end with can be shown."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "look_inside.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def run_cell(source, space):
    """Run a cell; returns the value of its last line, as a notebook would show it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) and not source.endswith(";") else None
    exec(compile(ast.Module(body, []), "cell", "exec"), space)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    )


def test_it_runs_and_shows_tables():
    pytest.importorskip("sklearn")
    space, shown = {}, []
    for cell in CELLS:
        if cell["cell_type"] == "code":
            shown.append(run_cell("".join(cell["source"]), space))
    tables = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(tables) == 5  # describe, preview, a report, describe again, damage
    assert all(table.startswith("<table>") for table in tables)
    assert any(report.deallocated for report in space["reports"])


def test_it_is_kept_without_outputs():
    assert all(not cell.get("outputs") for cell in CELLS)
