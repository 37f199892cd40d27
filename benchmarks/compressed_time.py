"""Six compressed networks over the plain ones, eager and in ONNX Runtime, batches 1, 8 and 64.

    python benchmarks/compressed_time.py [--only resnet18] [--repeats 7]

Half of the slots of every selective layer are closed, at random: in a residual trunk that lets few
filters go, so that much is gathered. Lines go to results/compressed_networks.jsonl, in which those
of the same networks are replaced. `round_to` is that of `compress`. CPU time, one thread, all
sides of a network and batch in turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import selectconv as sc
from selectconv.bench.interleave import in_turn, ratios
from selectconv.bench.selective_cost import build_network
from selectconv.core.threads import one_thread
from selectconv.deploy.onnx import open_session

FILE = Path(__file__).parent / "results" / "compressed_networks.jsonl"
NETWORKS = {  # as for `selectconv bench --model`, and the height and width of its images
    "resnet18": ("timm:resnet18", 64),
    "mobilenetv3_small": ("timm:mobilenetv3_small_100", 96),
    "efficientnet_b0": ("timm:efficientnet_b0", 96),
    "densenet100": ("densenet100", 32),
    "resnet164": ("resnet164", 32),
    "unet": ("benchmarks.networks:unet", 64),
}
BATCHES = (1, 8, 64)
ROUND_TO = (None, 1, 8)

Run = Callable[[Tensor], object]


def open_eager(network: nn.Module, x: Tensor) -> Run:
    """Run a network in PyTorch."""

    def run(images: Tensor) -> None:
        with torch.inference_mode():
            network(images)

    return run


def open_onnx(network: nn.Module, x: Tensor) -> Run:
    """Run a network in ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        sc.export_onnx(network, file, x)
        session: Run = open_session(file)
        return session


RUNTIMES = {"eager": open_eager, "onnxruntime": open_onnx}


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """Measure a network: a line for each runtime, batch and `round_to`."""
    model, side = NETWORKS[name]
    x = torch.randn(2, 3, side, side)
    closed = build_network(model, "closed", side).eval()
    networks = {"plain": build_network(model, "plain", side).eval()} | {
        f"round_to={number}": sc.compress(closed, x, round_to=number) for number in ROUND_TO
    }
    macs = {words: sc.count(network, x).macs for words, network in networks.items()}
    rows = []
    for runtime, open_network in RUNTIMES.items():
        opened = {words: open_network(network, x) for words, network in networks.items()}
        for batch in BATCHES:
            images = torch.randn(batch, 3, side, side)
            sides = {words: _call(run, images) for words, run in opened.items()}
            times = in_turn(sides, repeats)
            for words in (words for words in sides if words != "plain"):
                every = ratios(times[words], times["plain"])
                rows.append(
                    {
                        "network": name,
                        "image_size": side,
                        "runtime": runtime,
                        "batch": batch,
                        "round_to": words.partition("=")[2],
                        "time_ratio": round(statistics.median(every), 4),
                        "spread": [round(min(every), 4), round(max(every), 4)],
                        "n": repeats,
                        "macs_ratio": round(macs[words] / macs["plain"], 4),
                        "plain_ms": round(statistics.median(times["plain"]) * 1e3, 3),
                        "torch": torch.__version__,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _call(run: Run, images: Tensor) -> Callable[[], object]:
    return lambda: run(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks.networks
    for name in options.only:
        with one_thread():
            rows = measure(name, options.repeats)
        before = FILE.read_text().splitlines() if FILE.exists() else []
        kept = [line for line in before if json.loads(line)["network"] != name]
        FILE.write_text("".join(f"{line}\n" for line in [*kept, *map(json.dumps, rows)]))


if __name__ == "__main__":
    main()
