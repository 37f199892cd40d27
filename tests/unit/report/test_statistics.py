"""Numbers of a table, against scipy and by hand."""

import math

import pytest
from scipy import stats

from selectconv.lab.report.statistics import compare, correct_holm

PLAIN = {0: 32.98, 1: 32.51, 2: 31.75, 3: 33.1}
SELECT = {0: 32.41, 1: 31.48, 2: 30.33, 7: 99.0}


def test_comparison_is_that_of_scipy_on_the_common_seeds():
    result = compare(PLAIN, SELECT)
    plain, other = [PLAIN[s] for s in range(3)], [SELECT[s] for s in range(3)]
    wanted = stats.ttest_rel(other, plain)
    interval = wanted.confidence_interval(0.95)
    base = sum(plain) / 3
    assert (result.seeds, result.before) == ((0, 1, 2), pytest.approx(base))
    assert result.after == pytest.approx(sum(other) / 3)
    assert result.p == pytest.approx(wanted.pvalue)
    assert result.change == pytest.approx(100 * (sum(other) / 3 / base - 1))
    assert result.low == pytest.approx(100 * interval.low / base)
    assert result.high == pytest.approx(100 * interval.high / base)


def test_equivalence_is_the_larger_of_two_one_sided_tests_of_scipy():
    for by in (0.7, 0.3, -0.2, -0.7):
        differences = [by + seed / 10 for seed in PLAIN]
        other = {seed: PLAIN[seed] + one for seed, one in zip(PLAIN, differences, strict=True)}
        ends = [
            stats.ttest_1samp(differences, -0.5, alternative="greater").pvalue,
            stats.ttest_1samp(differences, 0.5, alternative="less").pvalue,
        ]
        assert compare(PLAIN, other, 0.5).p_within == pytest.approx(max(ends))
    assert math.isnan(compare(PLAIN, other).p_within)


def test_too_few_common_seeds_are_no_comparison():
    assert compare({0: 1.0, 1: 2.0}, {1: 1.0, 2: 2.0}) is None


@pytest.mark.parametrize("change", [-0.1, 0.0, 0.7])
def test_equal_differences_are_no_proof(change):
    plain = {0: 20.1, 1: 22.3, 2: 21.7}
    result = compare(plain, {seed: error + change for seed, error in plain.items()}, 0.5)
    assert math.isnan(result.p)
    assert math.isnan(result.p_within)
    assert result.change == pytest.approx(100 * change * 3 / sum(plain.values()))


def test_holm_never_falls_and_never_passes_one():
    assert correct_holm({"a": 0.9, "b": 0.01, "c": 0.02, "d": 0.02}) == pytest.approx(
        {"a": 0.9, "b": 0.04, "c": 0.06, "d": 0.06}
    )
    assert correct_holm({"a": 0.6, "b": 0.7}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert correct_holm({}) == {}


def test_holm_counts_what_has_no_p_wherever_it_stands():
    for names in ("abc", "bac", "bca"):
        found = correct_holm({name: {"a": math.nan, "b": 0.01, "c": 0.04}[name] for name in names})
        assert math.isnan(found["a"])
        assert (found["b"], found["c"]) == pytest.approx((0.03, 0.08))
