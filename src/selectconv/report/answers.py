"""What a comparison answers: each method against the one it is asked to be held against."""

from dataclasses import dataclass

from selectconv.report.groups import PAPERS_PLACEMENT, Group, Row, RowKey
from selectconv.report.statistics import Comparison, compare, correct_holm


@dataclass(frozen=True)
class Answer:
    """A row held against another.

    Attributes:
        row: the method.
        against: the baseline or, for another placement, the same method with the paper's.
        result: errors, paired by seed.
        p: corrected, where several questions were asked.
        is_corrected: whether it was.
        num_missing: planned runs that the answer still waits for.
    """

    row: Row
    against: Row
    result: Comparison
    p: float
    is_corrected: bool
    num_missing: int


def answer(group: Group) -> dict[RowKey, Answer]:
    """Compare what can be compared: at least two common seeds.

    First questions, and placements, stand for themselves. The others are corrected for their
    number by Holm's method; those that have no answer yet count.
    """
    baseline = group.baseline
    if baseline is None:
        return {}
    pairs: dict[RowKey, tuple[Row, Comparison]] = {}
    for key, row in group.rows.items():
        own = key.placement == PAPERS_PLACEMENT
        against = baseline if own else group.find(key.method)
        if against is None or row is baseline:
            continue
        result = compare(against.errors, row.errors)
        if result is not None:
            pairs[key] = (against, result)
    family = [
        key
        for key, row in group.rows.items()
        if row is not baseline
        and key.method not in group.first
        and key.placement == PAPERS_PLACEMENT
    ]
    adjusted = correct_holm({key: pairs[key][1].p if key in pairs else 1.0 for key in family})
    answers = {}
    for key, (against, result) in pairs.items():
        asked = family if key in adjusted else [key]
        missing = [*against.missing, *(name for k in asked for name in group.rows[k].missing)]
        answers[key] = Answer(
            group.rows[key],
            against,
            result,
            adjusted.get(key, result.p),
            is_corrected=len(asked) > 1,
            num_missing=len(missing),
        )
    return answers
