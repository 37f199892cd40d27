"""What the cells of a table say."""

import csv
import io

import pytest

import selectconv as sc
from fake_runs import SETTINGS, write_run
from selectconv.lab.report.collect import collect
from selectconv.lab.report.compare import group_runs
from selectconv.lab.report.tables import HEADER, PAPER, build_table, write_csv
from selectconv.lab.reproduce.grid import Grid, PlannedRun

SELECT = "+D+R zero+shift (select)"


def cells(table, method):
    [row] = [row for row in table.rows if row["method"].startswith(method)]
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, (plain, select) in enumerate([(20.0, 18.0), (22.0, 19.0), (21.0, 20.0)]):
        write_run(folder / f"p{seed}", method="plain", seed=seed, error=plain)
        write_run(folder / f"s{seed}", method="select", seed=seed, error=select)
    return folder


def test_mean_deviation_change_and_test(folder):
    grid = Grid("table1", "smoke", "", "", "A test.", ())
    [group] = group_runs(collect([folder]).runs, grid)
    table = build_table(group)
    plain, select = cells(table, "plain"), cells(table, SELECT)
    assert plain["test error %, last epoch"] == "21.00 ± 1.00"
    assert select["test error %, last epoch"] == "19.00 ± 1.00"
    assert select["best epoch"] == "19.00 ± 1.00"
    assert select["change"] == "-9.52 %"
    # By hand: differences -2, -3, -1; their mean over their standard error is -2 sqrt(3).
    assert select["p"] == "0.0742"
    assert select["95 % interval"] == "-21.35 to +2.31 %"
    assert not plain.keys() & {"change", "p"}
    for word in ("Scale: smoke.", "n = 3 seeds", "A test.", "quoted", f"{SELECT}: de-allocation"):
        assert word in table.caption


def test_held_out_results_and_the_margin_are_columns_and_in_the_caption(tmp_path):
    for seed, error in enumerate((30.0, 31.0, 32.0)):
        write_run(tmp_path / f"p{seed}", method="plain", seed=seed, holdout=(error, 0.9))
        other = (error + seed / 10, 0.9 + seed / 10)
        write_run(tmp_path / f"s{seed}", method="select", seed=seed, holdout=other)
    grid = Grid("table1", "", "", "", "", (), margin=0.5)
    table = build_table(group_runs(collect([tmp_path]).runs, grid)[0])
    row = cells(table, SELECT)
    assert row["held-out error %"] == "31.10 ± 1.10"
    assert row["held-out loss"] == "1.0000 ± 0.1000"
    assert (row["change of loss"], row["p, loss"]) == ("+11.11 %", "0.2254")
    # Differences 0, 0.1, 0.2: mean and std 0.1, the bound 0.4 away; two degrees of freedom.
    assert row["p, no loss"] == "0.0101"
    assert "1,701 images that were not trained on" in table.caption
    assert "within 0.5 points" in table.caption


def test_ways_of_selecting_are_rows_of_one_table(tmp_path):
    write_run(tmp_path / "a", method="plain", gamma=0.5)  # which plain training does not use
    write_run(tmp_path / "b", method="select", gamma=0.3)
    write_run(tmp_path / "c", method="select", gamma=0.2)
    [group] = group_runs(collect([tmp_path]).runs)
    assert [row["method"] for row in build_table(group).rows] == [
        "plain",
        f"{SELECT} (gamma 0.2) [grace 1]",
        f"{SELECT} (gamma 0.3) [grace 1]",
    ]


def test_the_paper_s_figures_are_those_of_its_network_and_data():
    assert PAPER["table2"]["condensenet182"]["cifar10"]["dealloc"]["params"] == "3.24M"
    models = set(sc.list_models())
    assert all(set(table) <= models for table in PAPER.values())
    # Relative changes as printed, against the printed means: CIFAR-10 has two decimals.
    for model in PAPER["table1"].values():
        plain, select = (
            float(model["cifar10"][m]["error"].split("±")[0]) for m in ("plain", "select")
        )
        assert 100 * (select / plain - 1) == pytest.approx(
            float(model["cifar10"]["select"]["change"][:-1]), abs=0.02
        )


def test_table_2_shows_the_paper_s_sizes_and_its_count(tmp_path):
    settings = {"model": "densenet_bc190", "data": "cifar10", "image_size": 16}
    options = {"growth_rate": 4, "units": [1, 1, 1]}
    write_run(tmp_path / "p", method="plain", model_options=options, **settings)
    [group] = group_runs(collect([tmp_path]).runs, Grid("table2", "", "", "", "", ()))
    row = cells(build_table(group), "plain")
    assert (row["paper: params"], row["paper: FLOPs"]) == ("25.6M", "9,388M")
    own, counted = (float(row[name][:-1]) for name in ("MACs", "MACs, CondenseNet's count"))
    assert counted > own > 0


def test_missing_runs_have_a_row_with_the_reason_and_one_that_many_share_is_said_once(folder):
    settings = {**SETTINGS, "method": "slimming", "target_macs": 0.6}
    runs = tuple(PlannedRun(f"z{seed}", {**settings, "seed": seed}) for seed in range(4))
    grid = Grid("table1", "", "", "", "", runs)
    [group] = group_runs(collect([folder]).runs, grid, {"z0": "killed"})
    row = cells(build_table(group), "slimming [target_macs 0.6]")
    assert (row["n"], row["test error %, last epoch"]) == ("0", "no finished run")
    assert row["missing"] == "z0: killed; z1 to z3 (3 runs): not finished"


def test_markdown_and_csv_have_the_same_cells(folder):
    [group] = group_runs(collect([folder]).runs)
    table = build_table(group)
    # Nothing is missing, and the paper has no figures for these: no columns for that.
    assert not {"missing", "paper: change", "held-out loss", "p, no loss"} & set(table.header)
    lines = [line.strip("| ").split(" | ") for line in table.to_markdown().splitlines()]
    [*read] = csv.DictReader(io.StringIO(write_csv([table])))
    assert list(read[0]) == ["table", *HEADER]
    assert lines[2] == table.header
    for line, row in zip(lines[4:], read, strict=False):
        assert line == [row[name] for name in table.header]
    assert f"- {table.findings[0]}" in table.to_markdown()
