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

import numpy as np
import torch
from torch import Tensor

from selectconv.functional import choose_dealloc, ecdm, expected_relu, normalize_ecdm
from selectconv.tables import text_table

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


def measure_gap(slots: int, outputs: int, gamma: float, trials: int, seed: int) -> dict[str, float]:
    """Compare the greedy choice with the exact ones on random layers.

    Returns:
        The case; how many slots each way closes, in the mean over the trials; and for the exact
        ones how many more these are, in the mean and in the worst trial.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = []
    for _ in range(trials):
        matrix = draw_ecdm(slots, outputs, generator)
        necdm = normalize_ecdm(matrix)
        greedy = len(choose_dealloc(necdm, gamma))
        exact = [largest_fitting_subset(d.numpy(), gamma) for d in (necdm, necdm * matrix.sign())]
        counts.append((greedy, *exact))
    greedy_counts, *best_counts = np.array(counts).T
    row = {"slots": slots, "outputs": outputs, "gamma": gamma, "trials": trials}
    row["greedy"] = float(greedy_counts.mean())
    for way, best in zip(("abs", "signed"), best_counts, strict=True):
        row[f"{way}_best"] = float(best.mean())
        row[f"{way}_mean_gap"] = float((best - greedy_counts).mean())
        row[f"{way}_worst_gap"] = int((best - greedy_counts).max())
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="random layers per case (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random layers (0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    rows = [measure_gap(*case, trials=args.trials, seed=args.seed) for case in CASES]
    if args.json:
        print(json.dumps(rows))
    else:
        lines = [[f"{value:.4g}" for value in row.values()] for row in rows]
        print(text_table([list(rows[0]), *lines], right=range(len(rows[0]))))


if __name__ == "__main__":
    main()
