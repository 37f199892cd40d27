"""`selectconv reproduce` and `selectconv report` as users call them."""

import csv
import re
import subprocess
import sys

import pytest

from fake_runs import seal, write_run
from selectconv.lab.cli import reproduce
from selectconv.lab.cli.main import main
from selectconv.lab.reproduce import jobs
from selectconv.lab.reproduce.grid import Grid, PlannedRun

SETTINGS = {
    "data": "digits",
    "epochs": 2,
    "subset": 64,
    "test_subset": 40,
    "batch_size": 32,
    "gamma": 0.2,
    "grace": 1,
    "seed": 0,
    "device": "cpu",
    "model_options": {"growth_rate": 4, "units": [1, 1]},
}


@pytest.fixture
def grid(monkeypatch, tmp_path):
    """A grid of two runs that work and one that fails."""
    runs = (
        PlannedRun("p", {**SETTINGS, "method": "plain"}),
        PlannedRun("s", {**SETTINGS, "method": "select"}),
        PlannedRun(
            "f", {**SETTINGS, "method": "zero", "data_root": str(tmp_path), "data": "cifar10"}
        ),
    )
    made = Grid("ablation", "smoke", "A title", "A note.", "A paired test.", runs)
    monkeypatch.setattr(reproduce, "load_grid", lambda table, scale: made)
    return made


def test_a_grid_is_run_once_reported_and_its_failures_named(grid, tmp_path, monkeypatch, capfd):
    out = tmp_path / "out"
    words = ["reproduce", "ablation", "--jobs", "2", "--out", str(out)]
    assert main(words) == 1
    shown = capfd.readouterr()
    assert "f failed: No cifar10 in" in shown.out
    assert "1 of 3 runs failed: f;" in shown.err

    page = (out / "report.html").read_text()
    assert "A title" in page
    assert "No cifar10 in" in page
    with (out / "tables.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_method = {row["method"].partition(" [")[0]: row for row in rows}
    assert by_method["plain"]["n"] == "1"
    assert by_method["+D+R zero"]["test error %, last epoch"] == "no finished run"
    assert by_method["+D+R zero"]["missing"].startswith("f: No cifar10 in")
    assert "Scale: smoke." in (out / "tables.md").read_text()

    # The second time only what failed is tried again.
    started = []
    before = jobs.start
    monkeypatch.setattr(
        "selectconv.lab.reproduce.jobs.start",
        lambda run, *rest: started.append(run.name) or before(run, *rest),
    )
    assert main(words) == 1
    assert started == ["f"]
    assert "3 runs, 2 done" in capfd.readouterr().out


def test_only_some_runs_are_carried_out(grid, tmp_path, monkeypatch, capfd):
    started = []

    def finish(run, out, *machine):
        started.append(run.name)
        write_run(out / "runs" / run.name, **run.settings)
        return subprocess.Popen(["true"])

    monkeypatch.setattr("selectconv.lab.reproduce.jobs.start", finish)
    monkeypatch.setattr("selectconv.lab.cli.reproduce.find_state", lambda run, out: "new")
    assert main(["reproduce", "ablation", "--only", "[ps]", "--out", str(tmp_path)]) == 0
    assert started == ["p", "s"]
    said = capfd.readouterr().out
    assert "2 runs, 0 done" in said
    assert said.index("chosen: p, s\n") < said.index("p done")
    # The table still says what was planned and is missing.
    assert "f: not finished" in (tmp_path / "tables.csv").read_text()


def test_a_dry_run_shows_one_row_with_whole_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "selectconv.lab.train.estimate.estimate_seconds",
        lambda configs, threads: dict.fromkeys(configs, 60.0),
    )
    words = [
        "--only",
        "*small_mobilenet-cifar10-*-2[01]",
        "--dry-run",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["reproduce", "table1", "--scale", "reduced", *words]) == 0
    shown = capsys.readouterr().out
    assert "4 runs into" in shown
    assert "about 4 minutes" in shown
    assert "selectconv.lab.reproduce.networks-small_mobilenet-cifar10-select-21" in shown


@pytest.mark.parametrize(
    ("table", "runs", "one"),
    [
        ("ablation", 12, "densenet40-digits-select-1"),
        ("table2", 10, "densenet_bc190-digits-slimming-1"),
    ],
)
def test_a_dry_run_prints_the_grid_and_touches_nothing(
    table, runs, one, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("selectconv.lab.train.estimate._REPEATS", 1)
    out = tmp_path / "out"
    assert main(["reproduce", table, "--dry-run", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert one in shown
    assert f"{runs} runs into" in shown
    assert "about" in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments are required: table;"),
        (["tabel1"], "Did you mean 'table1'"),
        (["table1", "--only", "resnet"], "`only` 'resnet' matches no run of table1, smoke"),
        (["table1", "--gpus-per-run", "-1"], "`gpus_per_run` must"),
        (["table1", "--scale", "ful"], "Did you mean 'full'"),
        (["table1", "--engine", "raye"], "Did you mean 'ray'"),
        (["table1", "--dry-run", "--no-run"], "--dry-run cannot be combined"),
        (["table1", "--jobs", "0"], "--jobs: must be a whole number of at least 1, got '0'"),
        (["table1", "--jobs", "two"], "--jobs: must be a whole number of at least 1, got 'two'"),
    ],
)
def test_wrong_words_are_named(words, message, capsys):
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_report_names_what_it_leaves_out(tmp_path, capsys):
    write_run(tmp_path / "good", method="select")
    foreign = write_run(tmp_path / "foreign", method="plain")
    (foreign / "config.yaml").write_text("model: densenet41\n")
    seal(foreign)
    (tmp_path / "nothing").mkdir()
    folders = [str(tmp_path / name) for name in ("good", "foreign", "nothing", "absent")]
    page = tmp_path / "deep" / "page.html"
    assert main(["report", *folders, "--out", str(page)]) == 0
    shown = capsys.readouterr()
    assert "1 run" in shown.out
    for place, word in (
        ("foreign", "Did you mean 'densenet40'"),
        ("nothing", "there is no run here or below"),
        ("absent", "there is no run here or below"),
    ):
        [line] = [line for line in shown.err.splitlines() if f"/{place}:" in line]
        assert word in line
        assert word.replace("'", "&#39;") in page.read_text()
    assert "selectconv train --config" in page.read_text()


def test_no_valid_run_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "--out", str(tmp_path / "r.html")]) == 2
    assert "no finished run to report" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_without_ray_the_extra_is_named(grid, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["reproduce", "ablation", "--engine", "ray", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "pip install 'selectconv[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_finished_can_be_reported_without_running_the_rest(grid, tmp_path, capsys):
    write_run(tmp_path / "runs" / "p", **grid.runs[0].settings)
    assert main(["reproduce", "ablation", "--no-run", "--out", str(tmp_path)]) == 0
    assert "tables.csv" in capsys.readouterr().out
    rows = (tmp_path / "tables.csv").read_text()
    assert "s: not finished" in rows
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--no-run"]])
def test_a_place_that_is_no_folder_is_refused_before_any_work(flags, grid, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        assert main(["reproduce", "ablation", *flags, "--out", str(tmp_path / place)]) == 2
        assert f"and {tmp_path / 'file'} is a file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", ".", "file/page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_any_work(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "p", method="plain")
    out = str(tmp_path / place) if place not in ("", ".") else place
    assert main(["report", str(tmp_path / "p"), "--out", out]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "`out` must be a" in line


def test_a_done_run_that_is_damaged_is_named_and_fails(grid, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(reproduce, "run_local", lambda *arguments: None)
    run = write_run(tmp_path / "runs" / "p", **grid.runs[0].settings)
    (run / "metrics.jsonl").write_text("")
    seal(run)
    assert main(["reproduce", "ablation", "--out", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert "p is done but cannot be reported: incomplete: it is 'done' and has 0 of 2" in shown.out
    assert "done but damaged, delete its folder" in shown.err
    assert "p: incomplete" in (tmp_path / "tables.csv").read_text()
    write_run(tmp_path / "runs" / "s", **grid.runs[1].settings)
    assert main(["reproduce", "ablation", "--only", "s", "--out", str(tmp_path)]) == 0


def test_unreadable_settings_stop_a_run_but_not_a_report(grid, tmp_path, capsys):
    run = write_run(tmp_path / "runs" / "p", **grid.runs[0].settings)
    (run / "config.yaml").write_text("model: [densenet40\n")
    assert main(["reproduce", "ablation", "--out", str(tmp_path)]) == 2
    assert f"Delete {run} to run it again" in capsys.readouterr().err
    assert main(["reproduce", "ablation", "--no-run", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "tables.md").exists()


def test_an_interrupted_grid_says_how_to_go_on(grid, tmp_path, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run_local", interrupt)
    assert main(["reproduce", "ablation", "--out", str(tmp_path / "out")]) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert (tmp_path / "out" / "tables.md").exists()


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "ablation"])
@pytest.mark.parametrize("scale", ["full", "reduced", "smoke"])
def test_a_grid_without_any_run_can_be_reported(table, scale, tmp_path):
    out = tmp_path / "out"
    assert main(["reproduce", table, "--scale", scale, "--no-run", "--out", str(out)]) == 0
    assert "not finished" in (out / "tables.md").read_text()


def test_a_folder_name_may_look_like_markup(grid, tmp_path, capsys):
    out = tmp_path / "x[red][/b]"
    assert main(["reproduce", "ablation", "--no-run", "--out", str(out)]) == 0
    assert f"wrote {out / 'tables.md'}" in capsys.readouterr().out
    assert main(["train", "--data", "digits", "--dry-run", "--out", str(out)]) == 0
    assert str(out) in re.sub(r"\s", "", capsys.readouterr().out)
