"""Train DenseNet-40 plain and selective on a part of Fashion-MNIST, and compare.

    python examples/demo.py [--epochs 4] [--subset 3000] [--out runs/demo]

gamma is 0.05 and re-opened slots get two epochs of grace: at the paper's 0.001 nothing moves in the
first epochs. So short a training shows how it works, not what it gains.
Where Fashion-MNIST cannot be had, scikit-learn's 8x8 digits take its place.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from selectconv.__main__ import main as selectconv
from selectconv.data.registry import fetch_dataset
from selectconv.errors import DataError
from selectconv.train.run_folder import ALLOCATION, METRICS, RunFolder

METHODS = ("plain", "select")


def choose_data(subset: int) -> list[str]:
    """Choose Fashion-MNIST, or digits where it cannot be had."""
    try:
        fetch_dataset("fashion-mnist")
    except DataError as error:
        print(
            f"Fashion-MNIST is not to be had here ({error}).\nThe demo takes 8x8 digits instead.\n"
        )
        return ["--data", "digits", "--batch-size", "64"]
    sizes = ["--subset", str(subset), "--test-subset", "1000", "--batch-size", "64"]
    return ["--data", "fashion-mnist", *sizes]


def compare(folders: dict[str, RunFolder]) -> Table:
    """Set the runs side by side."""
    table = Table(title="The same network, the same images, as many conv weights")
    table.add_column("method")
    heads = ("test error, last epoch", "best epoch", "de-allocated", "re-allocated", "images/s")
    for head in heads:
        table.add_column(head, justify="right")
    for method, folder in folders.items():
        rows = folder.read(METRICS)
        layers = [layer for row in folder.read(ALLOCATION) for layer in row["layers"].values()]
        speeds = sorted(row["images_per_second"] for row in rows)
        table.add_row(
            method,
            f"{rows[-1]['test_error']:.2f} %",
            f"{min(row['test_error'] for row in rows):.2f} %",
            str(sum(len(layer["closed"]) for layer in layers)),
            str(sum(len(layer["opened"]) for layer in layers)),
            f"{speeds[len(speeds) // 2]:.0f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--subset", type=int, default=3000)
    parser.add_argument("--out", default="runs/demo")
    options = parser.parse_args()
    if options.epochs < 1 or options.subset < 1:
        parser.error("--epochs and --subset must be at least 1")
    print(
        "DenseNet-40, plain and selective. gamma is 0.05 here: at the paper's 0.001 nothing moves"
    )
    print("in the first epochs.\n")
    data = choose_data(options.subset)
    folders = {method: RunFolder(Path(options.out) / method) for method in METHODS}
    for method, folder in folders.items():
        print(f"\n== {method}")
        settings = ["--method", method, "--gamma", "0.05", "--grace", "2", "--stop-at", "0.8"]
        epochs = ["--epochs", str(options.epochs)]
        code = selectconv(
            ["train", *data, *settings, *epochs, "--out", str(folder.path), "--overwrite"]
        )
        if code:
            return code
    print()
    console = Console(width=None if Console().is_terminal else 110)
    console.print(compare(folders))
    print("One seed and a few epochs: a difference of a point or two means nothing here.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
