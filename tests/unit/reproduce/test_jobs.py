"""Runs as processes: what is left, how they end, how many at a time, and that nothing survives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fake_runs import SETTINGS, seal, write_run
from selectconv.errors import UsageError
from selectconv.lab.reproduce import jobs
from selectconv.lab.reproduce.grid import PlannedRun


def planned(name="a", **settings):
    return PlannedRun(name, {**SETTINGS, "method": "plain", "seed": 0, **settings})


@pytest.fixture
def script(monkeypatch):
    """Replace a run's command by a script."""

    def replace(code):
        words = [sys.executable, "-c", code]
        monkeypatch.setattr(jobs, "prepare", lambda run, out: [*words, run.name, str(out)])

    return replace


def test_states(tmp_path):
    run = planned()
    assert jobs.find_state(run, tmp_path) == "new"
    folder = write_run(tmp_path / "runs" / "a", method="plain")
    assert jobs.find_state(run, tmp_path) == "done"
    (folder / "status.json").write_text('{"status": "failed", "message": "x"}')
    assert jobs.find_state(run, tmp_path) == "resume"
    with pytest.raises(
        UsageError, match=r"a holds a run with epochs 6, wanted 7: choose another --out"
    ):
        jobs.find_state(planned(epochs=7), tmp_path)


def test_a_run_of_another_version_is_refused_an_older_one_is_not(tmp_path):
    folder = write_run(tmp_path / "runs" / "a", method="plain")
    text = (folder / "config.yaml").read_text()
    older = "".join(line for line in text.splitlines(keepends=True) if "image_size" not in line)
    assert older != text
    (folder / "config.yaml").write_text(older)
    seal(folder)
    assert jobs.find_state(planned(), tmp_path) == "done"
    (folder / "config.yaml").write_text(text + "warp: 9\n")
    seal(folder)
    with pytest.raises(UsageError, match="a holds a run with warp 9, wanted None"):
        jobs.find_state(planned(), tmp_path)


def test_commands(tmp_path):
    run = planned()
    (tmp_path / "logs").mkdir()
    command = jobs.prepare(run, tmp_path)
    assert command[1:6] == ["-m", "selectconv", "train", "--out", str(tmp_path / "runs" / "a")]
    assert command[6:] == ["--config", str(tmp_path / "logs" / "a.yaml")]
    folder = write_run(tmp_path / "runs" / "a", method="plain")
    (folder / "status.json").write_text('{"status": "running"}')
    assert jobs.prepare(run, tmp_path)[-1] == "--resume"
    (folder / "status.json").write_text('{"status": "done"}')  # by now: it must not start again
    assert jobs.prepare(run, tmp_path)[-1] == "--resume"
    (folder / "config.yaml").unlink()  # killed before its settings were there
    assert jobs.prepare(run, tmp_path)[-1] == "--overwrite"


def test_failures_are_named_and_the_others_go_on(tmp_path, script):
    script(
        "import os, signal, sys\n"
        "print('hello')\n"
        "if sys.argv[1] == 'bad': sys.exit('selectconv: no disk left')\n"
        "if sys.argv[1] == 'dead': sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    problems = {}
    runs = [planned(name) for name in ("good", "bad", "dead", "fine")]
    jobs.run_local(runs, tmp_path, 2, problems.__setitem__)
    dead = "killed by signal 9; the last line was: hello"
    assert problems == {"good": None, "fine": None, "bad": "no disk left", "dead": dead}


def test_never_more_runs_at_a_time_than_asked_for(tmp_path, script):
    script(
        "import os, sys, time, pathlib\n"
        "folder = pathlib.Path(sys.argv[2]) / 'now'; folder.mkdir(exist_ok=True)\n"
        "mine = folder / sys.argv[1]; mine.touch(); time.sleep(0.3)\n"
        "print(len(list(folder.iterdir()))); mine.unlink()\n"
    )
    jobs.run_local(
        [planned(str(number)) for number in range(5)], tmp_path, 2, lambda name, problem: None
    )
    seen = [int(path.read_text()) for path in (tmp_path / "logs").glob("*.txt")]
    assert len(seen) == 5
    assert max(seen) == 2


@pytest.mark.parametrize("visible", [None, "3,7"])
def test_each_run_has_a_gpu_of_its_own(visible, tmp_path, script, monkeypatch):
    script("import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(1)")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    runs = [planned(name) for name in "abcd"]
    jobs.run_local(runs, tmp_path, 4, lambda name, problem: None)
    seen = [path.read_text().strip() for path in (tmp_path / "logs").glob("*.txt")]
    first, second = visible.split(",") if visible else "01"
    assert sorted(seen) == [first, first, second, second]


@pytest.mark.parametrize("listens", [True, False])
def test_an_interrupt_ends_the_runs(listens, tmp_path, script, monkeypatch):
    deaf = "" if listens else "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    script(f"import os, signal, sys, time; {deaf}print(os.getpid(), flush=True); time.sleep(60)")
    monkeypatch.setattr("selectconv.lab.reproduce.jobs._PATIENCE_S", 0.5)
    log = tmp_path / "logs" / "a.txt"

    def interrupt(seconds):
        if log.exists() and log.read_text().strip():
            raise KeyboardInterrupt
        time.sleep(0.05)

    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        jobs.run_local([planned()], tmp_path, 1, lambda name, problem: None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[0]), 0)
    assert (
        "KeyboardInterrupt" in log.read_text()
    ) is listens  # a training calls itself interrupted, not failed


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_run_dies_with_whoever_started_it(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from selectconv.lab.reproduce import jobs\n"
        "from selectconv.lab.reproduce.grid import PlannedRun\n"
        "out = pathlib.Path(sys.argv[1]); (out / 'logs').mkdir()\n"
        "jobs.prepare = lambda run, out: [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(jobs.start(PlannedRun('a', {}), out, 1).pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} still runs")
