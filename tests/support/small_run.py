"""A run of seconds in a process of its own, that can be told to die at a certain moment.

    python tests/support/small_run.py OUT [--die MOMENT] [--resume] [--seed N] [--method M]

Moments: `step N` (the N-th optimizer step), `NAME N` (when the N-th version of the run's file NAME
is written but not renamed yet).
"""

import argparse
import functools
import hashlib
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console

from selectconv.errors import SelectConvError
from selectconv.lab.cli import signals
from selectconv.lab.cli.display import RunDisplay
from selectconv.lab.cli.main import main as selectconv
from selectconv.lab.train import loop, network, run_folder
from selectconv.lab.train.config import resolve
from selectconv.lab.zoo import create_model

SETTINGS = {
    "data": "digits",
    "subset": 96,
    "test_subset": 40,
    "batch_size": 32,
    "epochs": 4,
    "gamma": 0.2,
    "device": "cpu",
}


def die() -> None:
    """End as a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(kind: str, number: int) -> None:
    """Replace the place that is to fail by one that dies."""
    calls = itertools.count(1)
    if kind == "step":
        step = torch.optim.SGD.step
        torch.optim.SGD.step = lambda self, *rest: (
            die() if next(calls) == number else step(self, *rest)
        )
        return
    replace = os.replace

    def replace_or_die(source, target):
        if Path(target).name == kind and next(calls) == number:
            die()
        replace(source, target)

    os.replace = replace_or_die


def write_digests(path: str) -> None:
    """Write one line per epoch and rank: a hash of all weights and one of the allocation."""
    run_epoch = loop.Training.run_epoch

    def run_and_write(self, epoch, display):
        outcome = run_epoch(self, epoch, display)
        weights, allocation = hashlib.sha256(), hashlib.sha256()
        for parameter in self.model.parameters():
            weights.update(parameter.detach().contiguous().numpy().tobytes())
        for name, buffer in self.model.named_buffers():
            if name.rpartition(".")[2] in ("gate", "index", "moved", "shifted"):
                allocation.update(buffer.numpy().tobytes())
        with open(f"{path}-{self.fabric.global_rank}", "a") as file:
            file.write(f"{epoch} {weights.hexdigest()} {allocation.hexdigest()}\n")
        return outcome

    loop.Training.run_epoch = run_and_write


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--die", nargs=2, metavar=("KIND", "NUMBER"))
    parser.add_argument("--die-rank", default="0", help="the rank that is to die")
    parser.add_argument("--digests", help="file for each rank's weights and allocation, hashed")
    parser.add_argument("--eval", action="store_true", help="test the run's last weights instead")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="select")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A narrow network: the test is about the run, not about the network.
    network.create_model = functools.partial(create_model, growth_rate=4, units=(1, 1, 1))
    if options.die and os.environ.get("RANK", "0") == options.die_rank:
        arrange_death(options.die[0], int(options.die[1]))
    config = resolve({**SETTINGS, "seed": options.seed, "method": options.method})
    folder = run_folder.RunFolder(options.out)
    is_first = run_folder.is_first_process()
    if options.eval:
        sys.exit(selectconv(["eval", options.out, "--json"]))
    folder.path.mkdir(parents=True, exist_ok=True)
    if not (folder / "last.ckpt").exists():
        folder.start(config.to_dict())
    console = Console(file=sys.stdout, quiet=not is_first)
    if options.digests:
        write_digests(options.digests)
    with signals.answered_by(signals.stop):
        try:
            fabric = signals.launch(config)
            loop.train(config, fabric, folder, RunDisplay(config, console), resume=options.resume)
        except SelectConvError as error:
            signals.ignore()  # as the command line does: torchrun's SIGTERM must not cut this off
            print(error, file=sys.stderr, flush=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
