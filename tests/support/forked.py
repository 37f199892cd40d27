"""Processes that start in no time: children of a server that has imported `small_run` already.

Most of a run of seconds is its imports. The server computes nothing before it forks, so the
children start as fresh processes do.
"""

import multiprocessing
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SUPPORT = Path(__file__).parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["small_run"])
RANKS = (0, 1)
TIMEOUT_S = 60


@dataclass
class Ended:
    """How a forked run ended: its exit code (negative: the signal), and what it said."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def starting():
    """Start children inside: the server, which starts with the first, finds `small_run`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        yield


class Forked:
    """Runs `small_run` in forked children; what they say goes to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def run(self, *arguments: object) -> Ended:
        """Run it alone."""
        return self._run(arguments, [{}])[0]

    def run_ranks(self, *arguments: object, port: int) -> list[Ended]:
        """Run it as two ranks, as a launcher does."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "forked"}
        return self._run(arguments, [{**shared, "RANK": r, "LOCAL_RANK": r} for r in ("0", "1")])

    def _run(self, arguments: tuple[object, ...], environments: list[dict[str, str]]):
        self.count += 1
        words = [str(word) for word in arguments]
        said = [self.folder / f"said-{self.count}-{rank}" for rank in range(len(environments))]
        children = [
            CONTEXT.Process(target=_become, args=(words, environment, str(path)))
            for environment, path in zip(environments, said, strict=True)
        ]
        with starting():
            for child in children:
                child.start()
        while alive := [child.sentinel for child in children if child.exitcode is None]:
            wait(alive)
            if any(child.exitcode for child in children):  # the others would wait for it
                for child in children:
                    child.kill()
        return [
            Ended(child.exitcode, Path(f"{path}.out").read_text(), Path(f"{path}.err").read_text())
            for child, path in zip(children, said, strict=True)
        ]


def _become(words: list[str], environment: dict[str, str], said: str) -> None:
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{said}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    sys.argv[1:] = words
    import small_run

    small_run.main()


def spawn(worker, folder, timeout_s=TIMEOUT_S):
    """Run `worker(rank)` on both ranks; return what each of them returned."""
    with starting():
        context = torch.multiprocessing.start_processes(
            _run, (worker, str(folder)), len(RANKS), join=False, start_method="forkserver"
        )
    try:
        deadline = time.monotonic() + timeout_s
        # A call returns as soon as one rank has ended, and raises that rank's error.
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, "a rank hangs"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in RANKS]


def _run(rank, worker, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(RANKS),
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    torch.manual_seed(rank)  # the ranks share no random numbers
    torch.save(worker(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
