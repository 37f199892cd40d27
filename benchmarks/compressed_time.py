"""CPU time of compressed networks against the plain ones, in turns in one process.

    python benchmarks/compressed_time.py [--batch-size 64] [--repeats 7] [--out FILE.jsonl]

Three cases: 55 % of the slots of every selective layer closed, at random, in DenseNet-100 and
ResNet-164; and a quarter of the slots of every 1x1 conv of DenseNet-40 re-allocated (top_k=3).
`per_macs` is the time ratio divided by the ratio of multiply-adds.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

import selectconv as sc
from selectconv.bench.interleave import in_turn, median_ratio

CASES = {
    "densenet100, 55% closed": ("densenet100", 0.55, False),
    "resnet164, 55% closed": ("resnet164", 0.55, False),
    "densenet40, 25% re-allocated": ("densenet40", 0.25, True),
}


def prepare(name: str, fraction: float, reopen: bool, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = sc.create_model(name, selective=True).eval()
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, sc.SelectConv2d) and (layer.shift is not None or not reopen):
            order = torch.randperm(layer.in_channels, generator=generator)
            layer.close(order[: round(fraction * layer.in_channels)])
            if reopen:
                layer.realloc(init="random", generator=generator)
    return model


def measure(case: str, batch_size: int, repeats: int) -> dict[str, object]:
    name, fraction, reopen = CASES[case]
    model, plain = prepare(name, fraction, reopen), sc.create_model(name).eval()
    x = torch.randn(batch_size, 3, 32, 32)
    small = sc.compress(model, x)
    macs = sc.count(model, x).macs / sc.count(plain, x).macs
    runs = {
        "plain": lambda: plain(x),
        "masked": lambda: model(x),
        "compressed": lambda: small(x),
    }
    with torch.inference_mode():
        times = in_turn(runs, repeats)
    ratios = {key: round(median_ratio(times[key], times["plain"]), 4) for key in runs}
    every = [one / base for one, base in zip(times["compressed"], times["plain"], strict=True)]
    return {
        "case": case,
        "batch_size": batch_size,
        "repeats": repeats,
        "macs_ratio": round(macs, 4),
        "masked_ratio": ratios["masked"],
        "time_ratio": ratios["compressed"],
        "spread": [round(min(every), 4), round(max(every), 4)],
        "per_macs": round(ratios["compressed"] / macs, 4),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        line = json.dumps(measure(case, options.batch_size, options.repeats))
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
