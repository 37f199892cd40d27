"""Algorithms 1 and 2 as pure functions, and the plans they are written down in."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from oracles_allocation import (
    most_closable,
    realloc_outcomes,
)
from selectconv import AllocationError, AllocationPlan
from selectconv.core.allocation import (
    ReallocRule,
    choose_dealloc,
    choose_sources,
    draw_offsets,
    realloc_scores,
)
from selectconv.core.plan import LayerPlan

# Algorithm 1


@pytest.mark.parametrize(
    ("rows", "gamma", "chosen"),
    [
        pytest.param([[0.25], [0.25], [0.5]], 0.5, [0, 1], id="a sum equal to gamma is inside"),
        pytest.param([[0.25], [0.25], [0.5]], 0.4999, [0], id="a sum just above gamma is outside"),
        pytest.param([[0.25], [0.25], [0.25], [0.25]], 0.5, [0, 1], id="ties to the lower index"),
        pytest.param([[0.5], [0.25], [0.25]], 1.0, [0, 1, 2], id="all fit"),
        pytest.param([[0.5], [0.0], [0.5], [0.0]], 0.0, [1, 3], id="gamma 0 takes zero rows only"),
        pytest.param([[0.75, 0.5], [0.25, 0.5]], 0.2, [], id="none fits"),
        pytest.param(
            [[0.25, 0.0], [0.3125, 0.0], [0.0, 0.375], [0.4375, 0.625]],
            0.4,
            [0],
            id="stops at the first that does not fit, even if a later one would",
        ),
        pytest.param(
            [[0.25, 0.25], [0.5, 0.0], [0.25, 0.75]], 0.5, [0], id="one output is enough to stop"
        ),
        pytest.param([[], [], []], 0.5, [0, 1, 2], id="no outputs"),
        pytest.param(np.empty((0, 3)), 0.5, [], id="no slots"),
        # 0.1 rounds up in float32: the row holds gamma as float32 sees it.
        pytest.param([[0.1], [0.9]], 0.1, [0], id="a gamma that float32 cannot hold"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choose_dealloc_by_hand(rows, gamma, chosen, dtype):
    result = choose_dealloc(torch.tensor(rows, dtype=dtype), gamma)
    assert result.tolist() == chosen
    assert result.dtype == torch.int64


@pytest.mark.parametrize(
    ("gamma", "error"),
    [
        (math.nan, ValueError),
        (-0.1, ValueError),
        (1.1, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("0.1", TypeError),
        (None, TypeError),
    ],
)
def test_choose_dealloc_refuses_gammas_outside_0_to_1(gamma, error):
    with pytest.raises(error, match=rf"`gamma` must be .*\[0, 1\], got {gamma!r}"):
        choose_dealloc(torch.rand(3, 2), gamma)


@pytest.mark.parametrize(
    ("necdm", "error", "message"),
    [
        (torch.rand(3), ValueError, r"`necdm` must have shape \(\*, \*\), got \(3,\)"),
        (torch.ones(3, 2, dtype=torch.int64), TypeError, "`necdm` .* got torch.int64"),
        ([[0.5]], TypeError, "`necdm` must be a tensor, got list"),
    ],
)
def test_choose_dealloc_refuses_what_is_no_matrix(necdm, error, message):
    with pytest.raises(error, match=message):
        choose_dealloc(necdm, 0.1)


def test_the_greedy_choice_can_miss_the_optimum():
    necdm = [[0.5, 0.0], [0.0, 0.53125], [0.5, 0.46875]]  # order 0, 2, 1: stops at 2
    assert choose_dealloc(torch.tensor(necdm), 0.625).tolist() == [0]
    assert most_closable(necdm, 0.625) == 2


# Algorithm 2: scores


def test_a_channel_scores_until_it_is_read_by_more_than_max_copies():
    necdm = torch.full((4, 1), 0.25)
    index = torch.tensor([0, 0, 0, 3])
    closed_reader = torch.tensor([True, True, False, True])
    assert realloc_scores(necdm, index, None, 3).tolist() == [0.25] * 4
    assert realloc_scores(necdm, index, None, 2).tolist() == [0, 0, 0, 0.25]
    # A closed slot reads nothing.
    assert realloc_scores(necdm, index, closed_reader, 2).tolist() == [0.25, 0.25, 0, 0.25]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"norm": "l1"}, ValueError, "`norm` must be one of l2, linf; got 'l1'"),
        ({"max_copies": 0}, ValueError, "`max_copies` must be at least 1, got 0"),
        ({"max_copies": 2.0}, TypeError, "`max_copies` must be an integer .* got 2.0"),
        ({"max_copies": True}, TypeError, "`max_copies` must be an integer .* got True"),
        ({"gate": torch.ones(3)}, TypeError, "`gate` must have dtype torch.bool, got torch.float"),
        (
            {"gate": torch.ones(2, dtype=torch.bool)},
            ValueError,
            r"`gate` .*\(3\) to match `necdm`, got \(2,\)",
        ),
        ({"index": torch.arange(4)}, ValueError, r"`index`.*\(3\) to match `necdm`, got \(4,\)"),
        ({"index": torch.zeros(3)}, TypeError, "`index` must have dtype torch.int64"),
        ({"necdm": torch.rand(3)}, ValueError, "`necdm` must have shape"),
    ],
)
def test_realloc_scores_refuse_bad_arguments(arguments, error, message):
    accepted = {"necdm": torch.rand(3, 2), "index": torch.arange(3)}
    with pytest.raises(error, match=message):
        realloc_scores(**{**accepted, **arguments})


# Algorithm 2: sources. A case: scores, index, gate, K, N_max.
CASES = {
    "one candidate, cap within the call": ([5, 1, 0, 0, 0], [0, 1, 2, 3, 4], "11000", 1, 2),
    "two candidates, one fills up": ([5, 4, 0, 0, 0], [0, 1, 2, 3, 4], "11000", 2, 2),
    "both fill up, a slot stays closed": ([5, 4, 0, 0, 0], [0, 1, 2, 3, 4], "11000", 2, 1),
    "two candidates read one channel": ([5, 4, 3, 0, 0], [0, 0, 2, 3, 4], "11100", 3, 2),
    "no cap": ([5, 4, 3, 0, 0], [0, 1, 2, 3, 4], "11100", 3, None),
    "fewer candidates than K": ([0, 4, 3, 0, 0], [0, 1, 2, 3, 4], "11100", 5, 1),
    "a source that reads another channel": ([5, 4, 0, 0], [3, 1, 2, 0], "1100", 2, 3),
    "closed slots in between": ([0, 5, 0, 4, 0, 0], [0, 1, 1, 3, 4, 5], "010100", 2, 2),
}
TRIALS = 2000
# Pearson's statistic has mean df and deviation sqrt(2 df); five deviations, for a fixed seed.
DEVIATIONS = 5


def as_tensors(case):
    scores, index, bits, top_k, max_copies = case
    gate = torch.tensor([bit == "1" for bit in bits])
    rule = ReallocRule(top_k=top_k, max_copies=max_copies)
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(index), gate, rule


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_choose_sources_follows_the_sequential_algorithm_in_distribution(case):
    scores, index, gate, rule = as_tensors(case)
    expected = realloc_outcomes(case[0], case[1], gate.tolist(), rule.top_k, rule.max_copies)
    generator = torch.Generator().manual_seed(0)
    seen = Counter()
    for _ in range(TRIALS):
        opened, source = choose_sources(scores, index, gate, rule, generator)
        seen[tuple(zip(opened.tolist(), source.tolist(), strict=True))] += 1
    assert set(seen) == set(expected)  # nothing impossible, and nothing possible left out
    pearson = sum(
        (seen[outcome] - TRIALS * float(chance)) ** 2 / (TRIALS * float(chance))
        for outcome, chance in expected.items()
    )
    freedom = len(expected) - 1
    assert pearson <= freedom + DEVIATIONS * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("axes", "near"), [(1, 2), (2, 8), (3, 26)])
def test_whole_offsets_are_the_nearest_that_no_open_slot_of_the_source_has(axes, near):
    ones, halves = [1.0] * axes, [0.5] * axes
    index = torch.tensor([0, 0, 0, 1])
    taken = torch.tensor([[0.0] * axes, ones, halves, [-1.0] * axes])
    source = torch.tensor([0, 1] * (near + 1))
    drawn = draw_offsets(source, index, taken, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, drawn.round())
    for channel, used in ((0, ones), (1, [-1.0] * axes)):
        own = [tuple(offset) for offset in drawn[source == channel].tolist()]
        assert len(set(own) | {tuple(used)}) == near + 2  # all of them different
        reach = [max(map(abs, offset)) for offset in own]
        assert reach == [1] * (near - 1) + [2] * 2  # never 0
    again = draw_offsets(source, index, taken, torch.Generator().manual_seed(0))
    other = draw_offsets(source, index, taken, torch.Generator().manual_seed(1))
    assert torch.equal(again, drawn)
    assert not torch.equal(other, drawn)


# Plans

PLANS = {
    "empty": LayerPlan(),
    "closing": LayerPlan(closed=torch.tensor([3, 1])),
    "shifted": LayerPlan(
        closed=torch.tensor([0]),
        opened=torch.tensor([0, 4]),
        source=torch.tensor([2, 2]),
        # float32 values without a short decimal: the round trip must not lose a bit.
        shift=torch.tensor([[1 / 3, -math.pi / 2], [1e-8, 0.1]]),
    ),
    "random weights": LayerPlan(
        opened=torch.tensor([4]), source=torch.tensor([2]), weight_seed=2**61 + 1
    ),
}


def assert_same_plan(plan, expected):
    for name in ("closed", "opened", "source", "shift"):
        ours, theirs = getattr(plan, name), getattr(expected, name)
        if theirs is None:
            assert ours is None
        else:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    assert plan.weight_seed == expected.weight_seed


def test_an_allocation_plan_survives_json_layer_by_layer():
    plan = AllocationPlan(dict(PLANS))
    read = AllocationPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert [name for name, _ in read] == list(PLANS)
    for name, layer_plan in read:
        assert_same_plan(layer_plan, PLANS[name])


def test_a_plan_is_true_when_it_changes_something():
    assert not PLANS["empty"]
    assert PLANS["closing"]
    assert PLANS["random weights"]
    assert not AllocationPlan()
    assert not AllocationPlan({"conv": LayerPlan()})
    assert AllocationPlan({"conv": PLANS["closing"]})


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="no keys"),
        pytest.param({"closed": []}, id="no opened"),
        pytest.param({"opened": []}, id="no closed"),
        pytest.param({"closed": 3, "opened": []}, id="closed is no list"),
        pytest.param({"closed": ["a"], "opened": []}, id="a slot is a word"),
        pytest.param({"closed": [2.7], "opened": []}, id="a slot is a fraction"),
        pytest.param({"closed": [2**70], "opened": []}, id="a slot overflows"),
        pytest.param({"closed": [math.inf], "opened": []}, id="a slot is infinite"),
        pytest.param({"closed": [2**70], "opened": []}, id="a slot beyond int64"),
        pytest.param({"closed": [], "opened": [[0, 1]]}, id="a row of two"),
        pytest.param({"closed": [], "opened": [[0, 1, "x"]]}, id="a shift is a word"),
        pytest.param({"closed": [], "opened": [[0, 1, [0.5]], [2, 1, [0.5, 1]]]}, id="ragged"),
        pytest.param({"closed": [], "opened": [[0, 1, None], [2, 1, [0.5, 1]]]}, id="mixed"),
        pytest.param({"closed": [], "opened": [], "weight_seed": "x"}, id="a seed is a word"),
        pytest.param(None, id="null"),
        pytest.param([1, 2], id="a list"),
    ],
)
def test_malformed_plans_are_refused(plan):
    with pytest.raises(AllocationError, match="reading it failed"):
        LayerPlan.from_dict(plan)
    with pytest.raises(AllocationError, match="reading it failed"):
        AllocationPlan.from_dict({"conv": plan})


@pytest.mark.parametrize("plan", [None, [1], "conv"])
def test_an_allocation_plan_must_be_a_dict(plan):
    with pytest.raises(AllocationError, match=f"dict by layer, got {type(plan).__name__}"):
        AllocationPlan.from_dict(plan)


@pytest.mark.parametrize("max_copies", [None, 1])
@pytest.mark.parametrize(("index", "named"), [([0, 2], "0 to 2"), ([-1, 1], "-1 to 1")])
def test_realloc_scores_refuse_channels_that_do_not_exist(index, named, max_copies):
    with pytest.raises(ValueError, match=f"`index` must name channels 0 to 1, got {named}"):
        realloc_scores(torch.ones(2, 3), torch.tensor(index), max_copies=max_copies)
