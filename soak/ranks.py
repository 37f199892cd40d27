"""Two processes train one network over gloo, and one of them is killed at a random moment."""

import os
import random
import re
import signal
import socket
import tempfile
import time
from functools import cache, partial
from pathlib import Path

from soak.commands import RUN, Child, Finished, differences
from soak.driver import DIFFERENT, FOREIGN, LOST, Ended, Wrong

TITLE = "two ranks (gloo), one of them killed at a random moment, and resumed"
WANTED = "the other one ends by itself with a line; the last bit of an undisturbed pair afterwards"
COUNT, LIMIT_S = 20, 3600


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Kill one of two ranks, then resume both."""
    wanted, took = undisturbed_pair()
    out, victim = scratch / "run", draw.randrange(2)
    what = f"rank {victim} killed"
    ranks = start(out)
    moment = time.monotonic() + draw.random() * took
    while time.monotonic() < moment and all(rank.poll() is None for rank in ranks):
        time.sleep(0.001)
    survivor = ranks[1 - victim]
    killed = ranks[victim].kill()
    time.sleep(2 * draw.random())
    if survivor.poll() is None:  # it has not noticed yet: torchrun tells it
        survivor.process.terminate()
    left = survivor.wait()
    line = check_survivor(what, left) if killed.code else ""
    ends = [rank.wait() for rank in start(out)]
    if any(ended.code for ended in ends):
        raise Wrong(what, LOST, f"{line} Resumed: {[ended.err[-200:] for ended in ends]}")
    if differing := differences(out, wanted):
        raise Wrong(what, DIFFERENT, f"{', '.join(differing)}; {line}")
    return Ended(what, "the same", line)


def check_survivor(what: str, ended: Finished) -> str:
    """Check that a rank that was left alone ended with a line of ours, and return the line."""
    if ended.code == 0:
        return "it was done"
    if ended.code == -signal.SIGTERM:  # before the run began, it is not ours to say
        return "ended by SIGTERM"
    ours = re.findall(r"^selectconv: .*$", ended.err, re.MULTILINE)
    if len(ours) != 1 or "Traceback" in ended.err or "SELECTCONV_DEBUG" in ours[0]:
        raise Wrong(what, FOREIGN, f"exit {ended.code}: {ended.err[-500:]}")
    return str(ours[0])


def start(out: Path) -> list[Child]:
    """Start both ranks, with the variables that torchrun sets, or resume them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [*RUN, *(["--resume"] if out.exists() else []), "--out", str(out)]
    return [Child(words, before=partial(_be_rank, rank, port)) for rank in (0, 1)]


def _be_rank(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="soak",
    )  # fmt: skip


@cache
def undisturbed_pair() -> tuple[Path, float]:
    """Train with two ranks that nobody disturbs; return the folder, and how long it took."""
    folder, started = Path(tempfile.mkdtemp(prefix="soak-pair-")) / "run", time.monotonic()
    for rank in start(folder):
        ended = rank.wait()
        assert ended.code == 0, ended.err
    return folder, time.monotonic() - started
