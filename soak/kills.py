"""Runs that are killed at random moments, several times each, and resumed."""

import random
import shutil
import time
from functools import cache
from pathlib import Path

from soak.commands import RUN, Child, Finished, differences, undisturbed
from soak.driver import DIFFERENT, LOST, Ended, Wrong

TITLE = "runs killed (SIGKILL) four times each at random moments, and resumed"
WANTED = "the last bit of an undisturbed run"
COUNT, LIMIT_S = 25, 3600
KILLS = 4


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Kill a run, kill its resumed self, and so on; then let it end."""
    out, killed, epochs = scratch / "run", 0, []
    what = "run killed, resumed"
    for _ in range(KILLS):
        child = start(out)
        pass_time(child, 0.7 * draw.random() * duration())  # a resumed run is shorter
        if child.poll() is not None:  # it was faster than the moment: done
            check(what, child.wait())
            break
        child.kill()
        killed += 1
        epochs.append(lines(out))
        if epochs[-1] < max(epochs) - 1:  # the checkpoint of an epoch comes after its line
            raise Wrong(what, LOST, f"epochs {epochs} after each kill")
    check(what, start(out).wait())
    if differing := differences(out, undisturbed()):
        raise Wrong(what, DIFFERENT, f"{', '.join(differing)} after {killed} kills at {epochs}")
    return Ended(what, "the same", data={"kills": killed, "epochs": epochs})


def start(out: Path) -> Child:
    """Start the run, or resume it where its folder exists."""
    return Child([*RUN, *(["--resume"] if out.exists() else []), "--out", str(out)])


def check(what: str, ended: Finished) -> None:
    """Check that a run came to its end."""
    if ended.code:
        raise Wrong(what, LOST, f"exit {ended.code}: {ended.err[-400:]}")


def lines(out: Path) -> int:
    """Count the epochs in a run's folder."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def pass_time(child: Child, seconds: float) -> None:
    """Wait until a command has computed for so long, or has ended."""
    while child.poll() is None and child.cpu_s() < seconds:
        time.sleep(0.001)


@cache
def duration() -> float:
    """Measure how long the run computes, which a busy machine does not change."""
    folder = undisturbed().parent / "timed"
    child, spent = Child([*RUN, "--out", str(folder)]), 0.0
    while child.poll() is None:
        spent = child.cpu_s()
        time.sleep(0.001)
    shutil.rmtree(folder)
    return spent
