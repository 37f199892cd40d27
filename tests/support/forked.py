"""Processes that start in no time: one process imports `small_run`, and forks for each run.

Most of a run of seconds is its imports. The server computes nothing before it forks, so the
children start as fresh processes do.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent


@dataclass
class Ended:
    """How a forked run ended: its exit code (negative: the signal), and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """Runs `small_run` in children of one process."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self.process, self.folder, self.count = process, folder, 0

    def run(self, *arguments: object) -> Ended:
        """Run it alone."""
        return self._ask([[*arguments]], [{}])[0]

    def run_ranks(self, *arguments: object, port: int) -> list[Ended]:
        """Run it as two ranks, as a launcher does."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "forked"}
        ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        return self._ask([[*arguments]] * 2, ranks)

    def _ask(self, runs: list[list[object]], environments: list[dict[str, str]]) -> list[Ended]:
        jobs = []
        for arguments, environment in zip(runs, environments, strict=True):
            self.count += 1
            said = str(self.folder / f"said-{self.count}")
            jobs.append(([str(word) for word in arguments], environment, said))
        self.process.stdin.write(json.dumps(jobs) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        return [
            Ended(code, Path(f"{said}.out").read_text(), Path(f"{said}.err").read_text())
            for code, (_, _, said) in zip(codes, jobs, strict=True)
        ]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Start a server, and end it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True
    ) as process:
        yield Server(process, folder)
    assert process.returncode == 0


def _serve() -> None:
    sys.path.insert(0, str(SUPPORT))
    import small_run

    for line in sys.stdin:
        children = [_fork(small_run.main, *job) for job in json.loads(line)]
        codes: dict[int, int] = {}
        while len(codes) < len(children):
            child, status = os.wait()
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child]:  # the others would wait for it
                for other in set(children) - set(codes):
                    os.kill(other, signal.SIGKILL)
        print(json.dumps([codes[child] for child in children]), flush=True)


def _fork(main, arguments, environment, said) -> int:
    child = os.fork()
    if child:
        return child
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{said}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
