"""What a comparison answers: each method compared with the baseline, question by question.

Held-out runs are asked in a fixed sequence: the loss first, then the error, which counts only if
the losses differ. Runs without held-out images are asked for the error alone.
"""

from dataclasses import dataclass

from selectconv.report.compare.groups import PAPERS_PLACEMENT, Group, Row, RowKey
from selectconv.report.compare.statistics import (
    LEVEL,
    Comparison,
    compare,
    correct_holm,
    equivalence_p,
)


@dataclass(frozen=True)
class Question:
    """One measure of a method, compared with another method's.

    Attributes:
        measure: "loss" or "error".
        before: mean of the other method, over the common seeds.
        after: mean of the method.
        result: the differences, paired by seed.
        p: corrected, where several methods were asked about.
        counts: whether the question before it in the sequence, if any, found a difference.
    """

    measure: str
    before: float
    after: float
    result: Comparison
    p: float
    counts: bool


@dataclass(frozen=True)
class Answer:
    """A method compared with another.

    Attributes:
        row: the method.
        against: the baseline or, for another placement, the same method with the paper's.
        questions: in the order in which they are asked; the error is the last.
        is_corrected: whether p was corrected by Holm's method.
        num_missing: planned runs that the answer still waits for.
        p_equivalent: of the test that the errors differ by less than the group's margin; None where
            nobody asks.
    """

    row: Row
    against: Row
    questions: tuple[Question, ...]
    is_corrected: bool
    num_missing: int
    p_equivalent: float | None = None

    @property
    def error(self) -> Question:
        """The question about the error."""
        return self.questions[-1]

    @property
    def loss(self) -> Question | None:
        """The question about the loss, where it is asked."""
        return self.questions[0] if len(self.questions) > 1 else None


def answer(group: Group) -> dict[RowKey, Answer]:
    """Compare what can be compared: at least two common seeds.

    First questions and placements are not corrected. The others are corrected for their
    number by Holm's method; those that have no answer yet count.
    """
    baseline = group.baseline
    if baseline is None:
        return {}
    pairs = {
        key: (other, row)
        for key, row in group.rows.items()
        if (other := _opponent(group, baseline, row)) is not None
    }
    family = [
        key
        for key, row in group.rows.items()
        if row is not baseline
        and key.method not in group.first
        and key.placement == PAPERS_PLACEMENT
    ]
    asked: dict[RowKey, list[Question]] = {}
    for measure in ("loss", "error") if group.is_held_out else ("error",):
        _ask(measure, pairs, family, asked)
    answers = {}
    for key, questions in asked.items():
        other, row = pairs[key]
        related = family if key in family else [key]
        missing = [*other.missing, *(name for k in related for name in group.rows[k].missing)]
        answers[key] = Answer(
            row,
            other,
            tuple(questions),
            is_corrected=len(related) > 1,
            num_missing=len(missing),
            p_equivalent=None
            if group.margin is None
            else equivalence_p(other.measured("error"), row.measured("error"), group.margin),
        )
    return answers


def _ask(
    measure: str,
    pairs: dict[RowKey, tuple[Row, Row]],
    family: list[RowKey],
    asked: dict[RowKey, list[Question]],
) -> None:
    """Add the question about a measure to what was asked before, for each pair that has one."""
    found = {
        key: result
        for key, (other, row) in pairs.items()
        if (result := compare(other.measured(measure), row.measured(measure))) is not None
    }
    corrected = correct_holm({key: found[key].p if key in found else 1.0 for key in family})
    for key, result in found.items():
        before = asked.setdefault(key, [])
        old, new = (row.mean(measure, result.seeds) for row in pairs[key])
        counts = all(question.p < LEVEL for question in before)
        p = corrected.get(key, result.p)
        before.append(Question(measure, old, new, result, p, counts))


def _opponent(group: Group, baseline: Row, row: Row) -> Row | None:
    """Return the row that a row is compared with; None for the baseline itself."""
    if row.key.placement != PAPERS_PLACEMENT:
        return group.find(row.key.method)
    return None if row is baseline else baseline
