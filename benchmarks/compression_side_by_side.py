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
from pathlib import Path
from typing import Any

import torch

from selectconv.deploy.cost import count
from selectconv.lab.bench.training import Silent
from selectconv.lab.data.registry import load_dataset
from selectconv.lab.train import loop
from selectconv.lab.train.config import resolve
from selectconv.lab.train.run_folder import describe_environment
from selectconv.lab.train.slimming import Slimmer

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "selectconv": {"method": "dealloc"},
    "torch-pruning L1": {"method": "slimming", "bn_sparsity": 0.0},
    "torch-pruning BN scale": {"method": "slimming"},
}
LINES, TABLE = "side_by_side.jsonl", "side_by_side.md"


def run_one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; returns the line of results."""
    settings = {
        "model": "densenet40",
        # A narrow network: hours on the full one would be needed for the same comparison.
        "model_options": {"growth_rate": options.growth_rate, "units": options.units},
        "data": options.data,
        "epochs": options.epochs,
        "batch_size": 64,
        "subset": options.subset,
        "test_subset": options.test_subset,
        "device": "cpu",
        "seed": seed,
        "bn_sparsity": options.bn_sparsity,
        **METHODS[name],
    }
    if name != "plain":
        settings["target_macs"] = options.target
    config = resolve(settings)
    splits = load_dataset(
        config.data, options.data_root, subset=config.subset, test_subset=config.test_subset
    )
    training = loop.Training(config, loop.build_fabric(config), splits)
    if name == "torch-pruning L1":
        assert isinstance(training.method, Slimmer)
        scores = training.method.pruning.importance
        training.method.importance = scores.MagnitudeImportance(p=1)
    example = torch.zeros(1, *splits.info.shape)
    dense = count(training.model, example)
    started = time.process_time()
    errors, steps, before = [], [], []
    act = training.method.step

    def test_and_act(epoch: int) -> Any:
        before.append(training.evaluate(Silent(), epoch)[1])
        return act(epoch)

    training.method.step = test_and_act  # type: ignore[method-assign]
    for epoch in range(config.epochs):
        row, report = training.run_epoch(epoch, Silent())
        errors.append(row["test_error"])
        if report:  # a line's error is that after the step
            steps.append((before[-1], row["test_error"]))
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
        # The largest rise of the test error through one cut, in points, and where it went to.
        "largest_rise": round(max((after - before for before, after in steps), default=0.0), 3),
        "error_after_last_cut": round(steps[-1][1], 3) if steps else None,
        "cpu_seconds": round(cpu_seconds, 1),
        "config": {**config.to_dict(), "growth_rate": options.growth_rate, "units": options.units},
        "command": shlex.join(["python", *sys.argv]),
        "environment": describe_environment(),
    }


def write_table(lines: list[dict[str, Any]], path: Path) -> None:
    """Write the Markdown table of all lines."""
    config = lines[0]["config"]
    text = [
        "# Compression, side by side on one reduced job",
        "",
        f"`{lines[0]['command']}`",
        "",
        f"A narrow DenseNet (growth rate {config['growth_rate']}, units {config['units']}) on "
        f"{config['data']}, {config['subset']} training and {config['test_subset']} test images, "
        f"{config['epochs']} epochs of batches of {config['batch_size']}, lr {config['lr']}. Mean "
        "over seeds, with the smallest and the largest in brackets. Errors are those of the last "
        "epoch. A reduced job: it ranks nothing but itself.",
        "",
        "| method | seeds | multiply-adds | parameters | test error % |"
        " largest rise through one cut (points) | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in METHODS:
        rows = [line for line in lines if line["method"] == name]
        if not rows:
            continue
        cells = [name, str(len(rows))]
        for key, digits in (
            ("macs_ratio", 3),
            ("params_ratio", 3),
            ("test_error", 2),
            ("largest_rise", 2),
            ("cpu_seconds", 0),
        ):
            values = [row[key] for row in rows]
            spread = f"{min(values):.{digits}f} to {max(values):.{digits}f}"
            cells.append(f"{statistics.mean(values):.{digits}f} ({spread})")
        text.append("| " + " | ".join(cells) + " |")
    environment = lines[0]["environment"]
    commits = {
        name: sorted(
            {str(row["environment"]["commit"])[:10] for row in lines if row["method"] == name}
        )
        for name in METHODS
    }
    made_by = "; ".join(f"{name}: {', '.join(found)}" for name, found in commits.items() if found)
    text += [
        "",
        f"torch {environment['versions']['torch']}, {environment['hardware']}, "
        f"{environment['threads']} thread. One line per run: `{LINES}`. Commits: {made_by}.",
        "",
    ]
    path.write_text("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/compression"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--subset", type=int, default=3000)
    parser.add_argument("--test-subset", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--growth-rate", type=int, default=8)
    parser.add_argument("--units", type=int, nargs="+", default=[3, 3, 3])
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--bn-sparsity", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / LINES
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in range(options.seeds):
        for name in METHODS:
            if any(line["method"] == name and line["seed"] == seed for line in lines):
                continue
            line = run_one(name, seed, options)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
            shown = ("method", "seed", "test_error", "macs_ratio", "largest_rise", "cpu_seconds")
            print({key: line[key] for key in shown}, flush=True)
    write_table(lines, options.out / TABLE)


if __name__ == "__main__":
    main()
