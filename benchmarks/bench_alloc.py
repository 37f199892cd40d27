"""Time one de- and re-allocation pass over DenseNet-BC-190 with 30% weak slots.

    python benchmarks/bench_alloc.py [--repeats 5] [--json]

188 layers, 126,290 slots. Each repeat runs on a fresh copy, with SGD momentum to clear.
"""

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import time

import torch

import selectconv as sc

WEAK = 0.3


def prepare() -> torch.nn.Module:
    """Build the network and scale a random 30% of each layer's slots down to nothing."""
    model = sc.create_model("densenet_bc190", selective=True)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, sc.SelectConv2d):
            slots = torch.randperm(layer.in_channels, generator=generator)
            with torch.no_grad():
                layer.weight[:, slots[: int(WEAK * layer.in_channels)]] *= 1e-9
    return model


def time_pass(model: torch.nn.Module) -> tuple[float, sc.AllocationReport]:
    """Time one allocator step on a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=2, max_copies=None)
    started = time.perf_counter()
    report = allocator.step(0)
    return time.perf_counter() - started, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    model = prepare()
    time_pass(model)  # warm up
    seconds = []
    for _ in range(options.repeats):
        elapsed, report = time_pass(model)
        seconds.append(elapsed)
    line = {
        "name": "alloc",
        "case": "densenet_bc190, 30% weak, SGD momentum",
        "value": round(statistics.median(seconds), 3),
        "unit": "s",
        "n": len(seconds),
        "spread": [round(min(seconds), 3), round(max(seconds), 3)],
        "deallocated": sum(map(len, report.deallocated.values())),
        "reallocated": sum(map(len, report.reallocated.values())),
        "torch": torch.__version__,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
    if options.json:
        print(json.dumps(line))
    else:
        print(f"one pass: median {line['value']} s of {line['n']} (from {line['spread']})")
        print(f"{line['deallocated']} slots de-allocated, {line['reallocated']} re-allocated")


if __name__ == "__main__":
    main()
