"""Three ways to halve a network's multiply-adds, on one reduced job, side by side in one run.

The same zoo network, data, epochs and schedule, and equal multiply-adds in the end:

* `plain`: the dense network, for reference;
* `selectconv`: de-allocation with `target_macs`, one budget over the first half of the epochs;
* `torch-pruning L1`: Torch-Pruning's L1 magnitude after the first half; the second half is
  fine-tuning;
* `torch-pruning BN scale`: sparse batch norm scales in the first half (network slimming), then
  Torch-Pruning's BN-scale pruner; the second half is fine-tuning.

Both of Torch-Pruning's rank the channels of all layers at once: with one part for every layer the
narrow layers of this job come no nearer to the target than 8 %.

One JSON line per run; lines that are there already are not run again. The table is made from them.

    python benchmarks/compression_side_by_side.py --seeds 3 --out results/compression
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from selectconv.deploy.cost import count
from selectconv.lab.data.registry import load_dataset
from selectconv.lab.train.config import resolve
from selectconv.lab.train.device import build_fabric
from selectconv.lab.train.loop import Display, Training, evaluate
from selectconv.lab.train.run_folder import describe_environment

SETTINGS: dict[str, Any] = {
    "model": "densenet40",
    # A narrow network: hours on the full one would be needed for the same comparison.
    "model_options": {"growth_rate": 8, "units": [3, 3, 3]},
    "data": "fashion-mnist",
    "subset": 3000,
    "test_subset": 2000,
    "epochs": 6,
    "batch_size": 64,
    "bn_sparsity": 1e-3,
    "device": "cpu",
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "selectconv": {"method": "dealloc", "target_macs": 0.5},
    "torch-pruning L1": {"method": "slimming", "target_macs": 0.5, "bn_sparsity": 0.0},
    "torch-pruning BN scale": {"method": "slimming", "target_macs": 0.5},
}
# The columns of the table: the key of a line, and its digits.
COLUMNS = {
    "multiply-adds": ("macs_ratio", 3),
    "parameters": ("params_ratio", 3),
    "test error %": ("test_error", 2),
    "largest rise through one cut (points)": ("largest_rise", 2),
    "CPU s": ("cpu_seconds", 0),
}
LINES, TABLE = "side_by_side.jsonl", "side_by_side.md"


def run_one(name: str, seed: int, data_root: str | None) -> dict[str, Any]:
    """Train once; returns the line of results."""
    config = resolve({**SETTINGS, **METHODS[name], "seed": seed})
    splits = load_dataset(
        config.data, data_root, subset=config.subset, test_subset=config.test_subset
    )
    training = Training(config, build_fabric(config), splits)
    if name == "torch-pruning L1":
        slimmer = training.method.step.__self__
        slimmer.importance = slimmer.pruning.importance.MagnitudeImportance(p=1)
    example = torch.zeros(1, *splits.info.shape)
    dense = count(training.model, example)
    started = time.process_time()
    errors, cuts, before = [], [], []
    act = training.method.step

    def test_and_act(epoch: int) -> Any:
        loaders, fabric = training.test_loaders, training.fabric
        before.append(evaluate(training.wrapped, loaders, fabric, Display(), epoch)["error"])
        return act(epoch)

    training.method.step = test_and_act
    for epoch in range(config.epochs):
        row, report = training.run_epoch(epoch, Display())
        errors.append(row["test_error"])
        if report:  # a line's error is that after the step
            cuts.append(row["test_error"] - before[-1])
    cpu_seconds = time.process_time() - started
    final = count(training.model, example)
    return {
        "method": name,
        "seed": seed,
        "test_error": round(errors[-1], 3),
        "best_error": round(min(errors), 3),
        "macs": final.macs,
        "macs_ratio": round(final.macs / dense.macs, 4),
        "params": final.params,
        "params_ratio": round(final.params / dense.params, 4),
        # The largest rise of the test error through one cut, in points.
        "largest_rise": round(max(cuts, default=0.0), 3),
        "cpu_seconds": round(cpu_seconds, 1),
        "config": config.to_dict(),
        "command": shlex.join(["python", *sys.argv]),
        "environment": describe_environment(),
    }


def write_table(lines: list[dict[str, Any]], path: Path) -> None:
    """Write the Markdown table of all lines."""
    config, environment = lines[0]["config"], lines[0]["environment"]
    rows, commits = [], []
    for name in METHODS:
        own = [line for line in lines if line["method"] == name]
        cells = [name, str(len(own))]
        for key, digits in COLUMNS.values():
            values = [line[key] for line in own]
            low, mean, high = (
                f"{value:.{digits}f}"
                for value in (min(values), statistics.mean(values), max(values))
            )
            cells.append(f"{mean} ({low} to {high})")
        rows.append(f"| {' | '.join(cells)} |")
        commits.append(f"{name}: {', '.join({line['environment']['commit'][:10] for line in own})}")
    path.write_text(
        f"""# Compression, side by side on one reduced job

`{lines[0]["command"]}`

A narrow DenseNet ({config["model_options"]}) on {config["data"]}, {config["subset"]} training and
{config["test_subset"]} test images, {config["epochs"]} epochs of batches of {config["batch_size"]},
lr {config["lr"]}. Mean over seeds, with the smallest and the largest in brackets. Errors are those
of the last epoch. A reduced job: it ranks nothing but itself.

| method | seeds | {" | ".join(COLUMNS)} |
|---|---:|{"---:|" * len(COLUMNS)}
{chr(10).join(rows)}

torch {environment["versions"]["torch"]}, {environment["hardware"]}, one thread.
One line per run: `{LINES}`. Commits: {"; ".join(commits)}.
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/compression"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-root", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / LINES
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = [(line["seed"], line["method"]) for line in lines]
    for seed, name in product(range(options.seeds), METHODS):
        if (seed, name) not in done:
            line = run_one(name, seed, options.data_root)
            lines.append(line)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, *(line[key] for key, _ in COLUMNS.values()), flush=True)
    write_table(lines, options.out / TABLE)


if __name__ == "__main__":
    main()
