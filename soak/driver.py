"""Runs the trials of a campaign in a process of its own, and writes one line of JSON for each.

A campaign is a module with `TITLE`, `WANTED`, `COUNT`, `LIMIT_S` and a function
`trial(number, draw, scratch)`, which returns an `Ended` or raises `Wrong`. What it does depends
on the campaign's name, the seed and its number alone. A trial that crashes its process or takes too
long is a line like any other, and the next one gets a new process.
"""

import datetime
import importlib.util
import json
import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# Ways in which a trial must not end.
LOST, DIFFERENT, FOREIGN, EXECUTED = "lost", "silently different", "not our error", "code executed"
CRASHED, HUNG, BROKEN = "crashed", "hung", "trial failed"
WRONG = (LOST, DIFFERENT, FOREIGN, EXECUTED, CRASHED, HUNG, BROKEN)


@dataclass(frozen=True)
class Ended:
    """A trial that ended as it should.

    Attributes:
        what: what was tried, in a few words; trials are counted by it.
        how: how it ended, in a few words.
        detail: a line that says more.
        data: numbers for tables.
    """

    what: str
    how: str
    detail: str = ""
    data: dict[str, Any] | None = None


class Wrong(Exception):
    """A trial that found something.

    Args:
        what: what was tried.
        how: one of `WRONG`.
        detail: what was seen.
    """

    def __init__(self, what: str, how: str, detail: str) -> None:
        super().__init__(detail)
        self.what, self.how, self.detail = what, how, detail


def load_campaign(name: str) -> Any:
    """Import a campaign: a module of this package or, if it has none of that name, any module."""
    inner = f"soak.{name}"
    return importlib.import_module(inner if importlib.util.find_spec(inner) else name)


def run_trial(name: str, seed: int, number: int) -> dict[str, Any]:
    """Carry out one trial in this process and return its row."""
    campaign, draw = load_campaign(name), random.Random(f"{name} {seed} {number}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"soak-{name}-", ignore_cleanup_errors=True) as scratch:
        try:
            ended = campaign.trial(number, draw, Path(scratch))
        except Wrong as wrong:
            ended = Ended(wrong.what, wrong.how, wrong.detail)
        except Exception:
            ended = Ended("", BROKEN, traceback.format_exc(limit=-4))
        told = ended.detail.replace(scratch, "SCRATCH").replace(str(Path.home()), "~")
        ended = replace(ended, detail=told)
    return describe(seed, number, ended, time.monotonic() - started)


def describe(seed: int, number: int, ended: Ended, seconds: float) -> dict[str, Any]:
    """Return the row of a trial."""
    row = {
        "seed": seed, "trial": number, "what": ended.what, "how": ended.how,
        "seconds": round(seconds, 2), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if ended.detail:
        row["detail"] = ended.detail
    return {**row, **(ended.data or {})}


class Worker:
    """A process that carries out trials, one after another, and is replaced when it dies.

    Args:
        name: of the campaign.
        seed: of the campaign.
        limit_s: how long a trial may take.
    """

    def __init__(self, name: str, seed: int, limit_s: float) -> None:
        self.name, self.seed, self.limit_s = name, seed, limit_s
        self.process: Any = None
        self.connection: Connection

    def run(self, number: int) -> dict[str, Any]:
        """Carry out a trial and return its row, however it ends."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.name, self.seed))
            self.process.start()
            theirs.close()
            self.connection.recv()  # it is ready; what it imports does not count
        started = time.monotonic()
        self.connection.send(number)
        try:
            if self.connection.poll(self.limit_s):
                row: dict[str, Any] = self.connection.recv()
                return row
            ended = Ended("", HUNG, f"after {self.limit_s:.0f} s")
        except EOFError:
            self.process.join()
            ended = Ended("", CRASHED, f"exit code {self.process.exitcode}")
        self.close()
        return describe(self.seed, number, ended, time.monotonic() - started)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def _serve(connection: Connection, name: str, seed: int) -> None:
    load_campaign(name)
    connection.send("ready")
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        connection.send(run_trial(name, seed, number))


def results_of(name: str, seed: int, folder: Path = RESULTS) -> dict[int, dict[str, Any]]:
    """Read the rows of a campaign by their number; a later one replaces an earlier one."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["trial"]: row for row in rows if row["seed"] == seed}


def run_campaign(
    name: str, seed: int, numbers: Iterable[int], *, folder: Path = RESULTS, again: bool = False
) -> dict[int, dict[str, Any]]:
    """Carry out the trials of a campaign that are not in its results yet.

    Args:
        name: of the campaign.
        seed: of the campaign.
        numbers: of the trials.
        folder: of the results.
        again: repeat those that ended wrong.

    Returns:
        All rows of this seed by number.
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    campaign = load_campaign(name)
    rows = results_of(name, seed, folder)
    if again:
        rows = {number: row for number, row in rows.items() if row["how"] not in WRONG}
    left = [number for number in numbers if number not in rows]
    worker = Worker(name, seed, campaign.LIMIT_S)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[wrong]} wrong")) as progress:
        task = progress.add_task(name, total=len(left), wrong=0)
        try:
            for number in left:
                row = rows[number] = worker.run(number)
                _append(folder / f"{name}.jsonl", row)
                wrong = sum(row["how"] in WRONG for row in rows.values())
                progress.update(task, advance=1, wrong=wrong)
                if row["how"] in WRONG:
                    progress.print(f"{name} {number}: {row['what']}: {row['how']}", markup=False)
        finally:
            worker.close()
    return rows


def _append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def fill_page(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of a page."""
    begin, end = f"<!-- begin of the {name} -->", f"<!-- end of the {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def one_line(text: str, most: int) -> str:
    """Make a text a cell of a table."""
    line = " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return line if len(line) <= most else line[:most] + " ..."
