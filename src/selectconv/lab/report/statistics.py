"""What a table says about pairs of runs: the relative change, and paired tests."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import TypeVar

from scipy import optimize, stats  # type: ignore[import-untyped]

Key = TypeVar("Key", bound=Hashable)

LEVEL, POWER = 0.05, 0.8


@dataclass(frozen=True)
class Comparison:
    """A method compared with another, paired by seed.

    Attributes:
        seeds: the common ones.
        before: mean of the other method over these seeds.
        after: mean of the method.
        change: of the mean, in per cent of `before`; negative is better.
        low: lower end of its 95 % interval.
        high: upper end.
        p: of the two-sided paired t-test.
        least: the true change, of either sign, that the test would have found with a probability of
            80 %, if the differences vary as they do here.
        p_within: of two one-sided ones that the means differ by less than a margin. A small one
            shows it, which a large `p` does not.
    """

    seeds: tuple[int, ...]
    before: float
    after: float
    change: float
    low: float
    high: float
    p: float
    p_within: float
    least: float


def compare(
    baseline: Mapping[int, float], other: Mapping[int, float], margin: float = math.nan
) -> Comparison | None:
    """Compare errors by seed; None with fewer than two common seeds.

    The interval is that of the mean difference (Student's t), in per cent of the baseline's mean,
    which is taken as exact. Where the differences are equal but for rounding, there is no spread
    to compare with: each p is NaN.

    Example:
        >>> result = compare({0: 10.0, 1: 11.0, 2: 12.0}, {0: 9.0, 1: 10.5, 2: 10.5}, margin=2)
        >>> round(result.change, 2), round(result.p, 4), round(result.p_within, 4)
        (-9.09, 0.0742, 0.0371)
    """
    seeds = tuple(sorted(set(baseline) & set(other)))
    if len(seeds) < 2:
        return None
    before, after = (fmean(one[seed] for seed in seeds) for one in (baseline, other))
    differences = [other[seed] - baseline[seed] for seed in seeds]
    mean, reach = fmean(differences), half_interval(differences)
    error = stdev(differences) / math.sqrt(len(seeds))
    student = stats.t(len(seeds) - 1, scale=error if error > 1e-12 * abs(mean) else math.nan)
    scale = 100 / before if before else math.nan
    change, low, high = (scale * end for end in (mean, mean - reach, mean + reach))
    # Of the two one-sided tests, the larger p is that of the nearer end of the margin.
    p, p_within = 2 * float(student.sf(abs(mean))), float(student.sf(margin - abs(mean)))
    least = scale * error * find_shift(len(seeds) - 1)
    return Comparison(seeds, before, after, change, low, high, p, p_within, least)


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean (Student's t); NaN for one value."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * error


@cache
def find_shift(freedom: int) -> float:
    """Return by how many standard errors a mean must differ from 0 to be found with `POWER`.

    Example:
        >>> round(find_shift(4), 2)  # five pairs
        3.76
    """
    bound = stats.t.ppf(1 - LEVEL / 2, freedom)
    return float(optimize.brentq(lambda x: stats.nct.sf(bound, freedom, x) - POWER, 0, 100))


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
    """Format a p-value, to stand behind "p".

    Example:
        >>> show_p(0.0312), show_p(1e-7), show_p(math.nan)
        ('= 0.0312', '< 0.0001', 'not defined')
    """
    if math.isnan(p):
        return "not defined"
    return "< 0.0001" if p < 1e-4 else f"= {p:.4f}"
