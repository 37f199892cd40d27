"""A grid on a local Ray with two CPUs, one worker of which is killed on the way."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from selectconv.errors import RunError
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.jobs import run_ray
from selectconv.lab.train.run_folder import METRICS, RunFolder

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'selectconv[ray]'")

SETTINGS = {
    "data": "digits",
    "method": "select",
    "subset": 96,
    "test_subset": 40,
    "batch_size": 32,
    "gamma": 0.2,
    "device": "cpu",
    "model_options": {"growth_rate": 4, "units": [1, 1]},
}
EPOCHS = 12


def find_worker(folder):
    """Return the process that started the run in `folder`: Ray's worker."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if str(folder).encode() in words and b"train" in words:
                return int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return None


def kill_worker(folder, killed):
    """Kill the worker of a run once the run has written its second epoch."""
    while not killed:
        if len(RunFolder(folder).read(METRICS)) >= 2:
            worker = find_worker(folder)
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
        time.sleep(0.05)


# What Ray itself does wrong is not ours to mend.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
@pytest.mark.timeout(600)  # Ray starts half a dozen processes: seconds here, minutes on busy cores
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")
def test_a_killed_worker_is_replaced_and_its_run_resumed(tmp_path):
    runs = [
        PlannedRun("long", {**SETTINGS, "seed": 0, "epochs": EPOCHS}),
        PlannedRun("short", {**SETTINGS, "seed": 1, "epochs": 2}),
    ]
    killed: list[int] = []
    problems: dict[str, str | None] = {}
    killer = threading.Thread(
        target=kill_worker, args=(tmp_path / "runs" / "long", killed), daemon=True
    )
    killer.start()
    run_ray(runs, tmp_path, 2, problems.__setitem__)
    assert not ray.is_initialized()
    assert len(killed) == 1
    assert problems == {"long": None, "short": None}
    rows = RunFolder(tmp_path / "runs" / "long").read(METRICS)
    assert [row["epoch"] for row in rows] == list(range(EPOCHS))
    # It was announced twice: started, and resumed by another worker.
    assert (tmp_path / "logs" / "long.txt").read_text().count("takes") == 2


def test_more_gpus_than_the_cluster_has_are_refused(tmp_path, monkeypatch):
    cluster = Mock(spec_set=["is_initialized", "cluster_resources"])  # not asked to run anything
    cluster.cluster_resources.return_value = {"CPU": 8.0, "GPU": 1.0}
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(RunError, match="a run needs 2 GPUs; the cluster has 1"):
        run_ray([], tmp_path, 1, lambda name, problem: None, gpus_per_run=2)
