"""Train a small DenseNet on part of Fashion-MNIST, plain and selective, and compare the two.

    python examples/demo.py [--seed 20] [--out runs/demo]

This is one seed of the reduced Table 1. Both runs have the same start, the same images and the same
number of trained conv weights, and are tested on every image that they were not trained on. What
select deploys is larger, by the small convs that shift. If Fashion-MNIST is not available,
scikit-learn's 8x8 digits show how it works, not what it gains.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import SubprocessError

import fetch_fashion_mnist
from rich.console import Console
from rich.table import Table

from selectconv.errors import DataError, SelectConvError
from selectconv.lab.cli.reproduce import run_grid
from selectconv.lab.data.registry import fetch_dataset
from selectconv.lab.report.collect import Run, collect
from selectconv.lab.reproduce.grid import Grid, load_grid

RESULTS = Path(__file__).resolve().parent.parent / "results" / "table1" / "runs"
DATA = "fashion-mnist"


def load_training() -> Grid:
    """Load the comparison of Table 1 that the demo shows one seed of."""
    grid = load_grid("table1", "reduced")
    runs = [run for run in grid.runs if run.config.data == DATA and run.stage == 0]
    return replace(grid, runs=tuple(runs))


def is_available(console: Console) -> bool:
    """Find Fashion-MNIST, or fetch it: from its own host, or else from Debian's package."""
    try:
        fetch_dataset(DATA)
    except DataError as error:
        try:
            fetch_fashion_mnist.fetch()
        except (OSError, SubprocessError):
            console.print(f"Fashion-MNIST is not available here ({error}).")
            return False
    return True


def choose_seed(seed: int, console: Console) -> Grid:
    """Choose one seed of the comparison; a tiny one where Fashion-MNIST is not available."""
    if not is_available(console):
        console.print("The demo trains on 400 digits instead, which are too few to show a gain.")
        tiny = load_grid("table1", "smoke")
        return replace(tiny, title="Demo", runs=tiny.runs[:2])
    grid = load_training()
    chosen = tuple(run for run in grid.runs if run.config.seed == seed)
    if not chosen:
        seeds = [run.config.seed for run in grid.runs]
        raise SystemExit(f"demo: --seed must be from {min(seeds)} to {max(seeds)}, got {seed}.")
    note = f"A small DenseNet on 10,000 images of Fashion-MNIST, 40 epochs, seed {seed}."
    return replace(grid, title="Demo", note=note, runs=chosen)


def compare(runs: dict[str, Run]) -> Table:
    """Set the runs side by side."""
    table = Table(title="Same network, same start, same images, same number of trained weights")
    table.add_column("method")
    about_run = ("error on unseen images", "loss", "slots moved", "seconds")
    for head in (*about_run, "deployed params", "deployed MACs"):
        table.add_column(head, justify="right")
    for method, run in runs.items():
        endpoint = "held-out" if run.holdout else "test"
        table.add_row(
            method,
            f"{run.score(endpoint, 'error'):.2f} %",
            f"{run.score(endpoint, 'loss'):.4f}",
            str(run.metrics[-1]["moved"]),
            f"{sum(row['seconds'] for row in run.metrics):.0f}",
            *(f"{size:,}" for size in (run.deployed.params, run.deployed.macs)),
        )
    return table


def count_wins() -> tuple[int, int]:
    """Count the seeds in results/ in which select ended with a lower error, and all seeds."""
    errors: dict[str, dict[int, float]] = {"plain": {}, "select": {}}
    names = {run.name for run in load_training().runs}
    for run in collect([RESULTS]).runs if RESULTS.is_dir() else ():
        if run.name in names and run.holdout:
            errors[run.config.method][run.config.seed] = run.holdout["error"]
    both = errors["plain"].keys() & errors["select"].keys()
    return sum(errors["select"][seed] < errors["plain"][seed] for seed in both), len(both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", default="runs/demo", type=Path)
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        grid = choose_seed(options.seed, console)
        run_grid(grid, options.out, jobs=2, console=console)
    except SelectConvError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"demo: {error}", file=sys.stderr)
        return 130
    found = collect([options.out / "runs"]).runs
    names = [run.name for run in grid.runs]
    console.print()
    console.print(compare({run.config.method: run for run in found if run.name in names}))
    wins, seeds = count_wins()
    if seeds and grid.scale != "smoke":
        console.print(
            f"One seed proves little. We ran {seeds} seeds of this training (results/table1): "
            f"in {wins} of them, select ended with a lower error than plain."
        )
    console.print(f"Open {options.out / 'report.html'} in a browser to see what moved where.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
