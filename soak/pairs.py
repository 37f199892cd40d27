"""Two commands at once on one folder: one works, the other is refused or reads what is whole."""

import random
from pathlib import Path

from soak.commands import RUN, Child, check_words, differences, undisturbed
from soak.driver import DIFFERENT, FOREIGN, LOST, Ended, Wrong
from soak.kills import duration, pass_time

TITLE = "pairs of commands on one run folder, the second at a random moment"
WANTED = "one run, with the last bit of an undisturbed one; the other refused in a line"
COUNT, LIMIT_S = 60, 3600

# The second command; the first one trains. Both train: the folder has one owner at a time.
TRAINERS = {
    "train and train": [],
    "train and train --overwrite": ["--overwrite"],
    "train and train --resume": ["--resume"],
}
READERS = {
    "train and eval": ["eval"],
    "train and compress": ["compress"],
    "train and export": ["export"],
    "train and report": ["report"],
}


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Start two commands, one a little later than the other."""
    out = scratch / "run"
    what = draw.choice([*TRAINERS] * 2 + [*READERS])
    first = Child([*RUN, "--out", str(out)])
    pass_time(first, draw.random() * duration() if draw.random() < 0.8 else 0)
    if what in TRAINERS:
        words = [*RUN, *TRAINERS[what], "--out", str(out)]
    else:
        words = [*READERS[what], str(out)]
        place = {"compress": "small.safetensors", "export": "small.onnx", "report": "page.html"}
        if words[0] in place:
            words += ["--out", str(scratch / place[words[0]])]
    second = Child(words)
    ends = [first.wait(), second.wait()]
    codes = [ended.code for ended in ends]
    said = [check_words(what, ended) for ended in ends if ended.code]
    if any("damaged" in line for line in said):
        raise Wrong(what, FOREIGN, f"a whole file was called damaged: {said}")
    if what in READERS and codes[0]:
        raise Wrong(what, LOST, f"the reader stopped the run: {ends[0].err[-300:]}")
    if all(codes):
        raise Wrong(what, LOST, f"neither worked: {[ended.err[-200:] for ended in ends]}")
    if left := [path.name for path in out.iterdir() if path.name.endswith(".part")]:
        raise Wrong(what, DIFFERENT, f"left behind: {left}")
    if differing := differences(out, undisturbed()):
        raise Wrong(what, DIFFERENT, f"{', '.join(differing)}; exit codes {codes}")
    return Ended(what, "both done" if not any(codes) else "one refused", data={"codes": codes})
