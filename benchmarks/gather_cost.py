"""When does gathering the open channels of a conv pay? The constant of `deploy/parts.py`.

    python benchmarks/gather_cost.py [--repeats 5]   # measures, and writes results/gathers.jsonl
    python benchmarks/gather_cost.py --fit           # what each constant costs, from the file

A case is a conv of which some inputs are closed, behind a 1x1 conv with ReLU. It is timed twice:
the open channels are gathered for a smaller conv, or all are convolved with weights of zero.
CPU time, one thread, the two in turn. A constant, in multiply-adds per element that is gathered,
decides for each case; `--fit` prints how much longer its choices take than the best ones.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.core.threads import num_threads
from selectconv.deploy.parts import MACS_PER_PASS
from selectconv.lab.bench.timing import in_turn, open_network, ratios

FILE = Path(__file__).parent / "results" / "gathers.jsonl"
BATCHES = (1, 8, 64)
SHAPES = (  # inputs, outputs, kernel size, height and width
    (64, 16, 1, 16),
    (256, 64, 1, 8),
    (96, 48, 1, 16),
    (128, 512, 1, 8),
    (48, 12, 3, 16),
    (64, 64, 3, 16),
    (256, 256, 3, 4),
)
CLOSED = (0.1, 0.25, 0.5, 0.8)
MOST_MACS = 4e8
CONSTANTS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RUNTIMES = ("eager", "onnxruntime")


class Case(nn.Module):
    """A conv behind a 1x1 conv with ReLU; the weights are random, only the time counts.

    Args:
        inputs: of the conv.
        outputs: of the conv.
        size: of its kernel.
        index: the inputs that are gathered for it; None: it reads all.
    """

    def __init__(self, inputs: int, outputs: int, size: int, index: Tensor | None) -> None:
        super().__init__()
        self.index: Tensor | None
        self.register_buffer("index", index)
        read = inputs if index is None else len(index)
        self.first = nn.Conv2d(32, inputs, 1, bias=False)
        self.second = nn.Conv2d(read, outputs, size, padding=size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve what is gathered, or all."""
        y = self.first(x).relu()
        if self.index is not None:
            y = torch.index_select(y, 1, self.index)
        out: Tensor = self.second(y)
        return out


def cases() -> Iterable[dict[str, Any]]:
    """Yield what is measured."""
    for runtime, batch, shape, closed in product(RUNTIMES, BATCHES, SHAPES, CLOSED):
        inputs, outputs, kernel, side = shape
        if batch * side**2 * outputs * inputs * kernel**2 <= MOST_MACS:
            yield {
                "runtime": runtime, "batch": batch, "inputs": inputs, "outputs": outputs,
                "kernel": kernel, "side": side, "open": inputs - round(closed * inputs),
            }  # fmt: skip


def measure(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Time a case: gathered over whole."""
    generator = torch.Generator().manual_seed(0)
    conv = (case["inputs"], case["outputs"], case["kernel"])
    index = torch.randperm(case["inputs"], generator=generator)[: case["open"]].sort().values
    x = torch.randn(case["batch"], 32, case["side"], case["side"], generator=generator)
    networks = {"gathered": Case(*conv, index), "whole": Case(*conv, None)}
    sides = {
        name: partial(open_network(network.eval(), x, case["runtime"]), x)
        for name, network in networks.items()
    }
    with torch.inference_mode():
        times = in_turn(sides, repeats, seconds=0.02)
    return {
        **case,
        "ratio": round(statistics.median(ratios(times["gathered"], times["whole"])), 4),
        "whole_us": round(statistics.median(times["whole"]) * 1e6, 2),
        "n": repeats,
        "torch": torch.__version__,
    }


def does_gather(case: dict[str, Any], constant: float) -> bool:
    """Decide as `deploy/parts.narrow` does."""
    closed = case["inputs"] - case["open"]
    return closed * case["outputs"] * case["kernel"] ** 2 > constant * case["open"]


def excess(rows: Sequence[dict[str, Any]], constant: float) -> float:
    """Return how much longer a constant's choices take than the best: the mean, as a fraction."""
    losses = [
        math.log((row["ratio"] if does_gather(row, constant) else 1.0) / min(row["ratio"], 1.0))
        for row in rows
    ]
    return math.expm1(statistics.mean(losses))


def read() -> list[dict[str, Any]]:
    """Read what was measured."""
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def print_fit(rows: Sequence[dict[str, Any]]) -> None:
    """Print what each constant costs, by runtime and batch."""
    kinds = sorted({(row["runtime"], row["batch"]) for row in rows})
    print("constant", *(f"{runtime} x{batch}" for runtime, batch in kinds), "all", sep="\t")
    for constant in sorted({*CONSTANTS, MACS_PER_PASS}):
        shares = [
            excess([row for row in rows if (row["runtime"], row["batch"]) == kind], constant)
            for kind in kinds
        ]
        every = [*shares, excess(rows, constant)]
        mark = "  <- deploy/parts.py" if constant == MACS_PER_PASS else ""
        print(f"{constant:g}", *(f"{share:.1%}" for share in every), sep="\t", end=f"{mark}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fit", action="store_true", help="print what each constant costs")
    options = parser.parse_args()
    if not options.fit:
        with num_threads(1):
            rows = [measure(case, options.repeats) for case in cases()]
        FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_fit(read())


if __name__ == "__main__":
    main()
