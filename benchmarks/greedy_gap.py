"""How many slots Algorithm 1 leaves open that an exact solution of Section 2.3 would close.

The paper calls the choice of slots to close a knapsack problem and solves it greedily. On layers
small enough to try every subset, this compares the greedy count with two optima:

* `abs`: the constraint of Algorithm 1 itself, sums of nECDM, which has no signs;
* `signed`: the constraint as Section 2.3 prints it, sums of ECDM with signs, in which slots can
  cancel. Columns are scaled as nECDM's are, so that gamma means the same in both.

Layers are drawn at random: E[X] of ReLU(BN) with random parameters, a normal weight for each entry,
and slots whose sizes differ log-normally, as they do in training.

    python benchmarks/greedy_gap.py --trials 200 --seed 0
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from selectconv.functional import choose_dealloc, ecdm, expected_relu, normalize_ecdm

CASES = (
    (8, 1, 0.1),
    (8, 8, 0.1),
    (8, 8, 0.3),
    (12, 1, 0.1),
    (12, 1, 0.3),
    (12, 8, 0.1),
    (12, 8, 0.3),
    (12, 32, 0.1),
    (12, 32, 0.3),
)
# Slots differ in size by about e^1.5 either way: some are weak enough to be closed at all.
LOG_SIZE = 1.5
# A subset's sum and the greedy's sum of the same slots may differ in their last bits.
SLACK = 1e-12


@dataclass(frozen=True)
class GapRow:
    """The gap of one case: means over the trials, and the worst trial, in slots."""

    slots: int
    outputs: int
    gamma: float
    trials: int
    greedy: float
    abs_best: float
    abs_mean_gap: float
    abs_worst_gap: int
    signed_best: float
    signed_mean_gap: float
    signed_worst_gap: int


def largest_fitting_subset(damage: np.ndarray, gamma: float) -> int:
    """Count the slots of the largest set whose summed rows of (I, O) stay within gamma."""
    slots = len(damage)
    subsets = (np.arange(2**slots)[:, None] >> np.arange(slots)) & 1
    fits = np.abs(subsets @ damage).max(axis=1) <= gamma + SLACK
    return int(subsets[fits].sum(axis=1).max())


def draw_ecdm(slots: int, outputs: int, generator: torch.Generator) -> Tensor:
    """Draw the ECDM (I, O) of a random pointwise layer, float64."""
    beta, scale, size = torch.randn(3, slots, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, slots, 1, 1, generator=generator, dtype=torch.float64)
    weight = weight * torch.exp(LOG_SIZE * size)[:, None, None]
    return ecdm(weight, expected_relu(beta, scale))


def measure_gap(slots: int, outputs: int, gamma: float, trials: int, seed: int) -> GapRow:
    """Compare the greedy choice with the exact ones on random layers."""
    generator = torch.Generator().manual_seed(seed)
    counts = []
    for _ in range(trials):
        matrix = draw_ecdm(slots, outputs, generator)
        necdm = normalize_ecdm(matrix)
        signed = (necdm * matrix.sign()).numpy()
        counts.append(
            (
                len(choose_dealloc(necdm, gamma)),
                largest_fitting_subset(necdm.numpy(), gamma),
                largest_fitting_subset(signed, gamma),
            )
        )
    greedy, best, signed_best = np.array(counts).T
    return GapRow(
        slots=slots,
        outputs=outputs,
        gamma=gamma,
        trials=trials,
        greedy=float(greedy.mean()),
        abs_best=float(best.mean()),
        abs_mean_gap=float((best - greedy).mean()),
        abs_worst_gap=int((best - greedy).max()),
        signed_best=float(signed_best.mean()),
        signed_mean_gap=float((signed_best - greedy).mean()),
        signed_worst_gap=int((signed_best - greedy).max()),
    )


def format_table(rows: Sequence[GapRow]) -> str:
    head = (
        "  I   O  gamma | closed: greedy | best(abs)  gap  worst | best(signed)  gap  worst",
        f"  mean over {rows[0].trials} random layers each, in slots",
    )
    lines = [
        f"{row.slots:3d} {row.outputs:3d}  {row.gamma:5.2f} | {row.greedy:14.2f} "
        f"| {row.abs_best:9.2f} {row.abs_mean_gap:4.2f} {row.abs_worst_gap:6d} "
        f"| {row.signed_best:12.2f} {row.signed_mean_gap:4.2f} {row.signed_worst_gap:6d}"
        for row in rows
    ]
    return "\n".join([*head, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="random layers per case (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random layers (0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if args.trials < 1:
        parser.error(f"--trials must be at least 1, got {args.trials}")
    rows = [measure_gap(*case, trials=args.trials, seed=args.seed) for case in CASES]
    print(json.dumps([asdict(row) for row in rows]) if args.json else format_table(rows))


if __name__ == "__main__":
    main()
