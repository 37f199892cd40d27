"""Two gloo processes under torchrun: what they share, and what happens when one dies.

Compared with one process is what theory says agrees: the test of given weights (sums over all
images, up to rounding) and the learning rates. The training losses do not agree: each process
normalises by the batch statistics of its own half, so the networks differ from the first step on.
That both see together exactly the batches of one process is tested with the loader.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from selectconv.train.run_folder import METRICS, RunFolder

SCRIPT = Path(__file__).parents[1] / "support" / "small_run.py"


def run(*arguments, launcher=()):
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def torchrun(*arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run(*arguments, launcher=launcher)


@pytest.mark.timeout(400)  # six jobs, each of which imports torch once or twice
def test_two_processes_agree_and_survive_the_death_of_one(tmp_path):
    digests = str(tmp_path / "digests")
    whole = torchrun(tmp_path / "whole", "--digests", digests)
    assert whole.returncode == 0, whole.stderr
    ranks = [Path(f"{digests}-{rank}").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1]  # weights and allocation, after every epoch
    assert len(ranks[0].splitlines()) == 4
    rows = RunFolder(tmp_path / "whole").read(METRICS)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["moved"] > 0

    one, two = (launch(tmp_path / "whole", "--eval").stdout for launch in (run, torchrun))
    one, two = (json.loads(said.strip().splitlines()[-1]) for said in (one, two))
    assert one["test_error"] == two["test_error"]
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-6)  # another order of sums
    assert run(tmp_path / "alone").returncode == 0
    alone = RunFolder(tmp_path / "alone").read(METRICS)
    assert [row["lr"] for row in alone] == [row["lr"] for row in rows]

    started = time.monotonic()
    killed = torchrun(tmp_path / "killed", "--die", "step", "5", "--die-rank", "1")
    assert killed.returncode != 0
    assert time.monotonic() - started < 60
    # From the broken connection or from torchrun's signal, whichever comes first.
    assert re.search("another process of (this|the) run has died", killed.stderr), killed.stderr

    again = str(tmp_path / "again")
    resumed = torchrun(tmp_path / "killed", "--resume", "--digests", again)
    assert resumed.returncode == 0, resumed.stderr
    # The last epoch's weights and allocation are those of the run that nobody disturbed.
    assert Path(f"{again}-1").read_text().splitlines()[-1] == ranks[1].splitlines()[-1]
