"""What a table says about several seeds: mean, deviation, relative change, paired tests."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation; `std` is NaN for a single value."""

    n: int
    mean: float
    std: float


@dataclass(frozen=True)
class Comparison:
    """A method compared with another, paired by seed.

    Attributes:
        seeds: the common ones.
        before: mean of the other method over these seeds.
        after: mean of the method.
        differences: of the pairs, method minus other.
        change: of the mean, in per cent of `before`; negative is better.
        low: lower end of its 95 % interval.
        high: upper end.
        p: of the two-sided paired t-test; NaN where the differences are all the same.
    """

    seeds: tuple[int, ...]
    before: float
    after: float
    differences: Summary
    change: float
    low: float
    high: float
    p: float


def summarize(values: Sequence[float]) -> Summary:
    """Compute mean and sample standard deviation.

    Example:
        >>> summarize([1.0, 2.0, 3.0])
        Summary(n=3, mean=2.0, std=1.0)
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return Summary(1, mean, math.nan)
    return Summary(n, mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)))


def compare(baseline: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    """Compare errors by seed; None with fewer than two common seeds.

    The interval is that of the mean difference (Student's t), in per cent of the baseline's mean,
    which is taken as exact.

    Example:
        >>> result = compare({0: 10.0, 1: 11.0, 2: 12.0}, {0: 9.0, 1: 10.5, 2: 10.5})
        >>> round(result.change, 2), round(result.p, 4)
        (-9.09, 0.0742)
    """
    from scipy import stats  # type: ignore[import-untyped]

    seeds = tuple(sorted(set(baseline) & set(other)))
    if len(seeds) < 2:
        return None
    before, after, differences = (
        summarize(values)
        for values in (
            [baseline[seed] for seed in seeds],
            [other[seed] for seed in seeds],
            [other[seed] - baseline[seed] for seed in seeds],
        )
    )
    error = differences.std / math.sqrt(differences.n)
    reach = float(stats.t.ppf(1 - LEVEL / 2, differences.n - 1)) * error
    scale = 100 / before.mean if before.mean else math.nan
    return Comparison(
        seeds,
        before.mean,
        after.mean,
        differences,
        change=scale * differences.mean,
        low=scale * (differences.mean - reach),
        high=scale * (differences.mean + reach),
        p=2 * tail(differences, abs(differences.mean)),
    )


def tail(differences: Summary, distance: float) -> float:
    """Return the upper tail of Student's t at a distance of the mean difference.

    NaN where the differences are equal but for rounding: there is no spread to compare with.
    """
    from scipy import stats

    error = differences.std / math.sqrt(differences.n)
    if error <= 1e-12 * abs(differences.mean):
        return math.nan
    return float(stats.t.sf(distance / error, differences.n - 1))


def equivalence_p(found: Comparison, margin: float) -> float:
    """Return p of two one-sided paired t-tests that the mean difference is within `margin`.

    A small p shows that the two differ by less than the margin, which a large p of `compare` does
    not.

    Example:
        >>> found = compare({0: 10.0, 1: 11.0, 2: 12.0}, {0: 10.1, 1: 11.0, 2: 12.1})
        >>> round(equivalence_p(found, 0.5), 4)
        0.0029
    """
    # The larger p of the two is that of the nearer bound.
    return tail(found.differences, margin - abs(found.differences.mean))


def correct_holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjust the p-values of several questions by Holm's method; NaN counts, and stays.

    Example:
        >>> correct_holm({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    adjusted = dict(p_values)
    known = [name for name, p in p_values.items() if not math.isnan(p)]
    largest = 0.0
    for rank, name in enumerate(sorted(known, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def show_p(p: float) -> str:
    """Format a p-value for a sentence.

    Example:
        >>> show_p(0.0312), show_p(1e-7), show_p(math.nan)
        ('p = 0.0312', 'p < 0.0001', 'p not defined')
    """
    if math.isnan(p):
        return "p not defined"
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"


def show_p_alone(p: float) -> str:
    """Format a p-value for a cell under the heading p.

    Example:
        >>> show_p_alone(0.0312), show_p_alone(1e-7)
        ('0.0312', '< 0.0001')
    """
    return show_p(p).removeprefix("p ").removeprefix("= ")
