"""Naive oracles of Section 2: Algorithms 1 and 2, the exact optimum, SelectChannel.

Written from the paper and API.md with plain Python loops, independently of the package. Matrices
are lists of rows, one row per slot.
"""

from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor

from oracles_formulas import add_up

Matrix = list[list[float]]


def naive_dealloc(necdm: Matrix, gamma: float) -> list[int]:
    """Algorithm 1: grow C by the slot of the smallest maximum while the sum stays within gamma."""
    outputs = len(necdm[0]) if necdm else 0
    taken: list[int] = []
    while len(taken) < len(necdm):
        smallest, best = None, None
        for slot, row in enumerate(necdm):
            if slot not in taken and (smallest is None or max(row) < smallest):
                smallest, best = max(row), slot
        grown = [*taken, best]
        if any(add_up(necdm[slot][output] for slot in grown) > gamma for output in range(outputs)):
            break
        taken = grown
    return sorted(taken)


def most_closable(damage: Matrix, gamma: float) -> int:
    """Find the optimum of Section 2.3's programme: the size of the largest set of slots that fits.

    The constraint is `|sum over the closed slots| <= gamma` for every output, so that it serves for
    nECDM as well as for signed ECDM.
    """
    outputs = range(len(damage[0]))
    for size in range(len(damage), 0, -1):
        for closed in combinations(range(len(damage)), size):
            if all(abs(add_up(damage[slot][j] for slot in closed)) <= gamma for j in outputs):
                return size
    return 0


def count_readers(index: list[int], gate: list[bool], channel: int) -> int:
    """Algorithm 2's N of a channel: the open slots that read it."""
    return sum(1 for read, is_open in zip(index, gate, strict=True) if is_open and read == channel)


def naive_scores(
    necdm: Matrix, index: list[int], gate: list[bool], max_copies: int | None, norm: str
) -> list[float]:
    """Algorithm 2's s."""
    scores = []
    for slot, row in enumerate(necdm):
        if norm == "l2":
            score = add_up(entry * entry for entry in row) ** 0.5
        else:
            score = max(abs(entry) for entry in row)
        if not gate[slot]:
            score = 0.0
        if max_copies is not None and count_readers(index, gate, index[slot]) > max_copies:
            score = 0.0
        scores.append(score)
    return scores


def top_candidates(scores: list[float], top_k: int) -> list[int]:
    """Algorithm 2's C: the slots of the highest scores, none of them 0, ties to the lower index."""
    by_score = sorted(range(len(scores)), key=lambda slot: (-scores[slot], slot))
    return [slot for slot in by_score[:top_k] if scores[slot] > 0]


def realloc_outcomes(
    scores: list[float], index: list[int], gate: list[bool], top_k: int, max_copies: int | None
) -> dict[tuple[tuple[int, int], ...], Fraction]:
    """Enumerate Algorithm 2 slot by slot, the cap tested at every assignment.

    Returns:
        The probability of each outcome, an outcome being the (re-opened slot, channel) pairs.
    """
    outcomes: dict[tuple[tuple[int, int], ...], Fraction] = {}

    def visit(slot: int, index: list[int], gate: list[bool], left: list[int], done, chance) -> None:
        if slot == len(gate):
            outcomes[done] = outcomes.get(done, Fraction(0)) + chance
            return
        if was_open[slot] or not left:
            visit(slot + 1, index, gate, left, done, chance)
            return
        for candidate in left:
            channel = was_index[candidate]
            new_index, new_gate = list(index), list(gate)
            new_index[slot], new_gate[slot] = channel, True
            remaining = [
                other
                for other in left
                if max_copies is None
                or count_readers(new_index, new_gate, was_index[other]) <= max_copies
            ]
            assigned = (*done, (slot, channel))
            visit(slot + 1, new_index, new_gate, remaining, assigned, chance / len(left))

    was_index, was_open = list(index), list(gate)
    visit(0, was_index, was_open, top_candidates(scores, top_k), (), Fraction(1))
    return outcomes


def naive_select(
    x: Tensor,
    gate: Tensor,
    index: Tensor,
    shift: Tensor | None = None,
    shifted: Tensor | None = None,
) -> Tensor:
    """SelectChannel of `x` (N, C, ...), slot by slot, with the shift's formula as matrices."""
    slots = []
    for slot in range(len(gate)):
        channel = x[:, int(index[slot])]
        if not gate[slot]:
            channel = torch.zeros_like(channel)
        elif shift is not None and shifted[slot]:
            for axis in range(x.ndim - 2):
                size = channel.shape[axis + 1]
                out = torch.arange(size, dtype=x.dtype)[:, None]
                read = torch.arange(size, dtype=x.dtype)[None, :]
                # Rows are the output's pixels, columns the input's: max(0, 1 - |y - p + b|).
                kernel = (1 - (out - read + shift[slot, axis].to(x.dtype)).abs()).clamp(min=0)
                moved = torch.tensordot(channel, kernel, dims=([axis + 1], [1]))
                channel = moved.movedim(-1, axis + 1)
        slots.append(channel)
    return torch.stack(slots, dim=1)
