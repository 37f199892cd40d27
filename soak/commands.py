"""The command line in child processes, and a run of seconds to try things on.

A child is forked from a process that has imported everything, so that it starts at once; it does
what `selectconv WORDS` does.
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soak.driver import FOREIGN, HUNG, Wrong

EPOCHS = 6
RUN = (
    "train", "--model", "densenet40", "--model-options", "{growth_rate: 4, units: [1, 1, 1]}",
    "--data", "digits", "--subset", "96", "--test-subset", "40", "--batch-size", "32",
    "--epochs", str(EPOCHS), "--gamma", "0.2", "--device", "cpu",
)  # fmt: skip
FORK = multiprocessing.get_context("fork")
STREAMS = ("out", "err")
CLOCKS = ("seconds", "images_per_second")  # what differs between any two runs
LIMIT_S = 1200  # the machine may be busy


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit code (negative: a signal) and what it said."""

    code: int
    out: str
    err: str


class Child:
    """A command under way.

    Args:
        words: what stands after `selectconv` on the command line.
        before: called in the child, before it begins.
    """

    def __init__(self, words: Sequence[str], before: Callable[[], object] | None = None) -> None:
        import_all()
        self.folder = tempfile.TemporaryDirectory(prefix="soak-said-")
        self.process = FORK.Process(target=_become, args=(words, self.folder.name, before))
        self.process.start()

    def poll(self) -> Finished | None:
        """Return how it ended; None: it is still under way."""
        if (code := self.process.exitcode) is None:
            return None
        return Finished(code, *(Path(self.folder.name, name).read_text() for name in STREAMS))

    def wait(self, cpu_limit_s: float = math.inf) -> Finished:
        """Wait for its end; one that does not end is killed, and wrong."""
        deadline = time.monotonic() + LIMIT_S
        while (ended := self.poll()) is None:
            if time.monotonic() > deadline or self.cpu_s() > cpu_limit_s:
                self.kill()
                raise Wrong("a command", HUNG, f"after {self.cpu_s():.0f} s of its own")
            time.sleep(0.005)
        return ended

    def cpu_s(self) -> float:
        """Return the time that it has computed, which a busy machine does not change."""
        if self.process.exitcode is not None:
            return 0.0
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> Finished:
        """End it as a power cut does."""
        self.process.kill()
        return self.wait()


def run(*words: str | Path) -> Finished:
    """Carry out a command."""
    return Child([str(word) for word in words]).wait()


def _become(words: Sequence[str], folder: str, before: Callable[[], object] | None) -> None:
    """Be the command, in a child."""
    sys.stdout, sys.stderr = (open(f"{folder}/{name}", "w") for name in STREAMS)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    if before is not None:
        before()
    from selectconv.__main__ import main

    sys.exit(main(list(words)))


@cache
def import_all() -> None:
    """Import what the commands use; nothing is computed, so a fork is safe."""
    import torch

    torch.set_num_threads(1)
    from selectconv.lab.cli import main

    for verb in main.VERBS:
        main._load(verb)
    import selectconv.deploy.onnx
    import selectconv.lab.cli.display
    import selectconv.lab.train.estimate
    import selectconv.lab.train.loop  # noqa: F401 - so that forked children have it


def check_words(what: str, ended: Finished, codes: Sequence[int] = (1, 2)) -> str:
    """Check that a command refused in one line of ours, and return the line.

    Raises:
        Wrong: it said something else, or ended with another code.
    """
    lines = [line for line in ended.err.strip().splitlines() if line.strip()]
    said = lines[-1] if lines else ""
    ours = [line for line in lines if line.startswith("selectconv: ")]
    is_ours = len(ours) == 1 and ended.code in codes and "SELECTCONV_DEBUG" not in said
    if not is_ours or "Traceback" in ended.err or re.search(r"weights_only", said):
        raise Wrong(what, FOREIGN, f"exit {ended.code}: {' | '.join(lines[-3:])[:400]}")
    return said


@cache
def undisturbed(seed: int = 0) -> Path:
    """Train the run of seconds once, without any trouble, and return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="soak-undisturbed-")) / "run"
    ended = run(*RUN, "--seed", str(seed), "--out", folder)
    assert ended.code == 0, ended.err
    return folder


@cache
def interrupted(seed: int = 0) -> Path:
    """Train the run up to its middle, as after Ctrl-C, and return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="soak-interrupted-")) / "run"
    words = [*RUN, "--seed", str(seed), "--out", str(folder)]
    ended = Child(words, before=_stop_in_the_middle).wait()
    assert ended.code == 130, ended.err
    return folder


def _stop_in_the_middle() -> None:
    from selectconv.lab.train.loop import Training

    run_epoch = Training.run_epoch

    def run_or_stop(self: Training, epoch: int, display: Any) -> Any:
        if epoch == EPOCHS // 2:
            raise KeyboardInterrupt
        return run_epoch(self, epoch, display)

    Training.run_epoch = run_or_stop  # type: ignore[method-assign]


def content(folder: Path) -> dict[str, Any]:
    """Return what a finished run has to have, bit by bit, whatever happened on the way."""
    import torch

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = torch.load(folder / "last.ckpt", weights_only=True)
    files = ("last.safetensors", "best.safetensors", "allocation.jsonl", "config.yaml")
    return {
        "metrics": [{k: v for k, v in row.items() if k not in CLOCKS} for row in rows],
        "last.ckpt": digest(state),
        **{name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
        "status": json.loads((folder / "status.json").read_text())["status"],
    }


def digest(value: Any) -> str:
    """Return a hash of nested dicts and lists of tensors and plain values."""
    import torch

    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        text: Any = hashlib.sha256(bits).hexdigest(), str(value.dtype), tuple(value.shape)
    elif isinstance(value, dict):
        text = [(key, digest(one)) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        text = [digest(one) for one in value]
    else:
        text = value
    return hashlib.sha256(repr(text).encode()).hexdigest()


def differences(folder: Path, other: Path) -> list[str]:
    """Name what differs between two finished runs; a file that cannot be read differs."""
    have: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
        have = content(folder)
    return [name for name, value in content(other).items() if have.get(name) != value]
