"""The live view of `reproduce`: what it reads, what it says, and the time left."""

import io
import json

import pytest
from rich.console import Console

from selectconv.lab.cli.live import LiveRuns, draw_runs
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.progress import RunProgress, read_progress, seconds_left
from selectconv.lab.train.manifest import write_files

RUN = PlannedRun("a", {"data": "digits", "epochs": 4})


def write_metrics(out, rows):
    folder = out / "runs" / "a"
    folder.mkdir(parents=True)
    lines = [json.dumps({"epoch": n, "seconds": 2.0, "test_error": e}) for n, e in enumerate(rows)]
    write_files(folder, {"metrics.jsonl": ("\n".join(lines) + "\n").encode()})


def test_progress_is_read_from_the_runs_own_lines(tmp_path):
    assert read_progress(RUN, tmp_path) == RunProgress("a", 4)
    write_metrics(tmp_path, [50.0, 40.0])
    assert read_progress(RUN, tmp_path) == RunProgress("a", 4, 2, 4.0, 40.0)


@pytest.mark.parametrize("text", ["{\n", '{"epoch": 0}\n', "[1]\n"])
def test_a_file_that_cannot_be_read_tells_nothing(tmp_path, text):
    write_metrics(tmp_path, [])
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text(text)
    assert read_progress(RUN, tmp_path) == RunProgress("a", 4)


@pytest.mark.parametrize(
    ("runs", "jobs", "left"),
    [
        ([RunProgress("a", 10)], 1, None),
        ([RunProgress("a", 10, 5, 50.0)], 1, 50.0),
        ([RunProgress("a", 10, 5, 50.0), RunProgress("b", 10)], 1, 150.0),
        ([RunProgress("a", 10, 5, 50.0), RunProgress("b", 10)], 2, 100.0),  # b alone takes 100
        ([RunProgress("a", 10, 10, 50.0)], 2, 0.0),
    ],
)
def test_the_time_that_is_left(runs, jobs, left):
    assert seconds_left(runs, jobs) == left


def test_the_view_shows_the_runs_under_way_and_all_of_them():
    runs = [RunProgress("a", 10, 10, 50.0, 5.0), RunProgress("b", 10, 5, 300.0, 12.5)]
    screen = io.StringIO()
    Console(file=screen, width=120).print(draw_runs(runs, {"b"}, 1))
    said = screen.getvalue()
    assert "5/10" in said
    assert "12.50 %" in said
    assert "1 of 2 runs done" in said
    assert "about 5 minutes left" in said


def test_a_terminal_gets_the_view_and_a_log_does_not(tmp_path):
    write_metrics(tmp_path, [50.0])
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=120)
        with LiveRuns([RUN], tmp_path, 1, console) as live:
            live.watch([RUN])
        assert ("1/4" in screen.getvalue()) == terminal
