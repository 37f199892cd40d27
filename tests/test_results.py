"""Every number in results/ and in the README is what the runs' files say."""

import json
from pathlib import Path

import pytest

from scripts import load_script
from selectconv.lab.report.tables import build_table, write_csv
from selectconv.lab.reproduce.grid import TABLES, load_grid
from selectconv.lab.reproduce.jobs import find_state

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
GRIDS = [table for table in TABLES if (RESULTS / table / "runs").is_dir()]
SUMMARY = load_script("results/make_summary.py")  # reads every run once, for all tests


def groups_of(table):
    return [group for name, group, _ in SUMMARY.load_groups() if name == table]


def runs_of(table):
    rows = [row for group in groups_of(table) for row in group.rows]
    return [run for row in rows for run in (*row.runs.values(), *row.unused)]


def test_the_ablation_is_there():
    assert "ablation" in GRIDS


def test_pages_say_what_the_runs_say():
    for path, text in SUMMARY.write_pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run make results"


@pytest.mark.parametrize("table", GRIDS)
def test_tables_are_made_from_the_runs(table):
    made = [build_table(group) for group in groups_of(table)]
    text = (RESULTS / table / "tables.md").read_text(encoding="utf-8")
    assert text == "\n".join(one.to_markdown() for one in made), f"{table}: run make results"
    assert (RESULTS / table / "tables.csv").read_text(encoding="utf-8") == write_csv(made)


@pytest.mark.parametrize("table", GRIDS)
def test_runs_are_whole_and_those_of_the_grid(table):
    planned = {run.name: run for run in load_grid(table, "reduced").runs}
    folders = sorted((RESULTS / table / "runs").iterdir())
    runs = runs_of(table)
    assert sorted(run.path for run in runs) == folders  # none was left out
    gone = {run.name for run in runs if run.gone}
    assert {folder.name for folder in folders} <= set(planned) | gone
    for folder in folders:
        assert folder.name in gone or find_state(planned[folder.name], RESULTS / table) == "done"
        environment = json.loads((folder / "env.json").read_text())
        assert environment["commit"], folder
        # Results of a campaign lay beside the runs of one commit (results/PROTOCOL.md).
        assert environment["dirty"] is environment["commit"].startswith("31f3882"), folder


@pytest.mark.parametrize("table", GRIDS)
def test_a_method_of_a_comparison_was_run_by_one_commit(table):
    for group in groups_of(table):
        for row in group.rows:
            # Runs of afd4b88, 31f3882 and 4113f15 are equal to the bit (results/PROTOCOL.md).
            commits = {run.environment["commit"][:7] for run in row.runs.values()}
            assert len(commits - {"31f3882", "4113f15"}) <= 1, (group.title, row.name)
