"""Two gloo processes: what they share, and what happens when one dies.

Compared with one process is what theory says agrees: the test of given weights (sums over all
images, up to rounding) and the learning rates. The training losses do not agree: each process
normalises by the batch statistics of its own half, so the networks differ from the first step on.
That both see together exactly the batches of one process is tested with the loader.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked import Forked
from selectconv.lab.train.run_folder import METRICS, RunFolder

SCRIPT = Path(__file__).parents[1] / "support" / "small_run.py"


def torchrun(*arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.timeout(400)  # seconds alone, minutes on busy cores
def test_two_processes_agree_and_survive_the_death_of_one(tmp_path):
    server = Forked(tmp_path)
    digests = str(tmp_path / "digests")
    whole = server.run_ranks(tmp_path / "whole", "--digests", digests, port=free_port())
    assert [rank.returncode for rank in whole] == [0, 0], whole
    ranks = [Path(f"{digests}-{rank}").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1]  # weights and allocation, after every epoch
    assert len(ranks[0].splitlines()) == 4
    rows = RunFolder(tmp_path / "whole").read(METRICS)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["moved"] > 0

    one = server.run(tmp_path / "whole", "--eval")
    two, _ = server.run_ranks(tmp_path / "whole", "--eval", port=free_port())
    one, two = (json.loads(ended.stdout.strip().splitlines()[-1]) for ended in (one, two))
    assert one["test_error"] == two["test_error"]
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-6)  # another order of sums
    assert server.run(tmp_path / "alone").returncode == 0
    alone = RunFolder(tmp_path / "alone").read(METRICS)
    assert [row["lr"] for row in alone] == [row["lr"] for row in rows]

    started = time.monotonic()
    killed = torchrun(tmp_path / "killed", "--die", "step", "5", "--die-rank", "1")
    assert killed.returncode != 0
    assert time.monotonic() - started < 60
    # From the broken connection or from torchrun's signal, whichever comes first.
    assert re.search("another process of (this|the) run has died", killed.stderr), killed.stderr

    again = str(tmp_path / "again")
    resumed = server.run_ranks(
        tmp_path / "killed", "--resume", "--digests", again, port=free_port()
    )
    assert [rank.returncode for rank in resumed] == [0, 0], resumed
    # The last epoch's weights and allocation are those of the run that nobody disturbed.
    assert Path(f"{again}-1").read_text().splitlines()[-1] == ranks[1].splitlines()[-1]


def _is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_process_that_waits_for_the_others_can_be_stopped(number, tmp_path):
    """In C++, where torch waits, Python's own handlers are not called."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **one, **place, "TORCHELASTIC_RUN_ID": "test"}
    words = ["train", "--data", "digits", "--epochs", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "selectconv", *words, "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            while not _is_listening(int(place["MASTER_PORT"])):
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(timeout=60) == -number
        finally:
            process.kill()
