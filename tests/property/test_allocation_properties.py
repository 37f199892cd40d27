"""Properties of Algorithms 1 and 2 for drawn matrices and allocations (STYLE.md, items 3 and 4)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles_allocation import most_closable, naive_dealloc, naive_scores, realloc_outcomes
from selectconv.core.allocation import ReallocRule, choose_dealloc, choose_sources, realloc_scores

# Multiples of 1/64 add up without rounding, in any order and dtype: ties and sums equal to gamma
# are drawn often, and every comparison below is exact.
UNITS = 64


@st.composite
def matrices(draw, max_slots=8, max_outputs=4):
    outputs = draw(st.integers(1, max_outputs))
    # Small numbers are drawn more often, so that several slots fit.
    entry = st.integers(0, 6) | st.integers(0, UNITS)
    row = st.lists(entry, min_size=outputs, max_size=outputs)
    rows = draw(st.lists(row, min_size=1, max_size=max_slots))
    return [[value / UNITS for value in values] for values in rows]


gammas = st.integers(0, UNITS).map(lambda value: value / UNITS)


@given(matrices(), gammas)
def test_dealloc_is_algorithm_1_and_stays_within_gamma(rows, gamma):
    for dtype in (torch.float32, torch.float64):
        chosen = choose_dealloc(torch.tensor(rows, dtype=dtype), gamma).tolist()
        assert chosen == naive_dealloc(rows, gamma)
    for output in range(len(rows[0])):
        assert sum(rows[slot][output] for slot in chosen) <= gamma
    assert len(chosen) <= most_closable(rows, gamma)


@given(matrices(max_slots=20), gammas, gammas)
def test_dealloc_closes_more_never_less_as_gamma_grows(rows, one, other):
    necdm = torch.tensor(rows)
    less, more = (set(choose_dealloc(necdm, gamma).tolist()) for gamma in sorted((one, other)))
    assert less <= more


@st.composite
def allocations(draw, max_slots):
    slots = draw(st.integers(1, max_slots))
    exactly = {"min_size": slots, "max_size": slots}
    index = draw(st.lists(st.integers(0, slots - 1), **exactly))
    gate = draw(st.lists(st.booleans(), **exactly))
    return index, gate


caps = st.none() | st.integers(1, 4)


@given(st.data(), allocations(max_slots=10), caps, st.sampled_from(["l2", "linf"]))
def test_scores_are_algorithm_2s(data, allocation, max_copies, norm):
    index, gate = allocation
    row = st.lists(st.integers(0, 9), min_size=2, max_size=2)
    rows = data.draw(st.lists(row, min_size=len(index), max_size=len(index)))
    ours = realloc_scores(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(index),
        torch.tensor(gate),
        max_copies,
        norm,
    )
    expected = naive_scores(rows, index, gate, max_copies, norm)
    assert ours.tolist() == pytest.approx(expected, rel=1e-12, abs=0)  # a square root's last bits


@given(st.data(), allocations(max_slots=7), caps, st.integers(1, 4), st.integers(0, 2**31))
def test_sources_are_an_outcome_of_algorithm_2(data, allocation, max_copies, top_k, seed):
    index, gate = allocation
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(index), max_size=len(index)))
    capped = naive_scores([[value] for value in drawn], index, gate, max_copies, "l2")
    rule = ReallocRule(top_k=top_k, max_copies=max_copies)
    opened, source = choose_sources(
        torch.tensor(capped, dtype=torch.float32),
        torch.tensor(index),
        torch.tensor(gate),
        rule,
        torch.Generator().manual_seed(seed),
    )
    outcome = tuple(zip(opened.tolist(), source.tolist(), strict=True))
    assert outcome in realloc_outcomes(capped, index, gate, top_k, max_copies)
