"""What a comparison answers: each method compared with the baseline, question by question.

Held-out runs are asked in a fixed sequence: the loss first, then the error, which counts only if
the losses differ. Runs without held-out images are asked for the error alone.
"""

from dataclasses import dataclass

from selectconv.lab.report.compare.groups import (
    PAPERS_GROWTH,
    PAPERS_PLACEMENT,
    Group,
    Row,
    RowKey,
)
from selectconv.lab.report.compare.statistics import (
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
        against: the other method: the baseline or, for another placement, the paper's.
        before: mean of the other method, over the common seeds.
        after: mean of the method.
        result: the differences, paired by seed.
        p: corrected, where several methods were asked about.
        counts: whether the question before it in the sequence, if any, found a difference.
    """

    measure: str
    against: Row
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
        questions: in the order in which they are asked; the error is the last.
        of_rule: then those against the paper's rule, for a row that grows by another one.
        is_corrected: whether p was corrected by Holm's method.
        num_missing: planned runs that the answer still waits for.
        p_equivalent: of the test that the errors differ by less than the group's margin; None where
            nobody asks.
    """

    row: Row
    questions: tuple[Question, ...]
    is_corrected: bool
    num_missing: int
    p_equivalent: float | None = None
    of_rule: tuple[Question, ...] = ()

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
    if not group.baselines:
        return {}
    asked_about = {key: row for key, row in group.rows.items() if not group.is_baseline(row)}
    family = [
        key
        for key in asked_about
        if key.method not in group.first and key.placement == PAPERS_PLACEMENT
    ]
    asked: dict[RowKey, list[Question]] = {}
    for measure in ("loss", "error") if group.is_held_out else ("error",):
        found: dict[RowKey, tuple[Row, Comparison]] = {}
        for key, row in asked_about.items():
            against = _opponent(group, row, measure)
            result = against and compare(against.measured(measure), row.measured(measure))
            if against is not None and result:
                found[key] = (against, result)
        corrected = correct_holm({key: found[key][1].p if key in found else 1.0 for key in family})
        for key, (against, result) in found.items():
            before = asked.setdefault(key, [])
            p = corrected.get(key, result.p)
            before.append(ask(measure, against, group.rows[key], result, p, before))
    return {
        key: _conclude(group, group.rows[key], questions, family if key in family else [key])
        for key, questions in asked.items()
    }


def ask(
    measure: str, against: Row, row: Row, result: Comparison, p: float, before: list[Question]
) -> Question:
    """Compare a measure of two methods; `before`: the questions that come before this one."""
    old, new = (one.mean(measure, result.seeds) for one in (against, row))
    return Question(measure, against, old, new, result, p, all(one.p < LEVEL for one in before))


def _ask_of_rule(group: Group, row: Row, before: list[Question]) -> list[Question]:
    """Ask the same questions about another growth rule, against the paper's."""
    papers = group.find(row.key.method) if row.key.growth != PAPERS_GROWTH else None
    asked = list(before)
    for measure in [question.measure for question in before] if papers else []:
        assert papers is not None
        result = compare(papers.measured(measure), row.measured(measure))
        if result is not None:
            asked.append(ask(measure, papers, row, result, result.p, asked))
    return asked[len(before) :]


def _conclude(group: Group, row: Row, questions: list[Question], related: list[RowKey]) -> Answer:
    """Put a row's questions together; `related` are the rows that its correction counts."""
    of_rule = _ask_of_rule(group, row, questions)
    opponents = {question.against.key for question in (questions[0], *of_rule)}
    waiting = {
        name
        for key, one in group.rows.items()
        if key in related or key in opponents or group.is_baseline(one)
        for name in one.missing
    }
    p_equivalent = None
    if group.margin is not None:
        against = questions[-1].against
        errors = against.measured("error"), row.measured("error")
        p_equivalent = equivalence_p(*errors, group.margin)
    is_corrected = len(related) > 1
    return Answer(row, tuple(questions), is_corrected, len(waiting), p_equivalent, tuple(of_rule))


def _opponent(group: Group, row: Row, measure: str) -> Row | None:
    """Return the row that another one is compared with."""
    if row.key.placement != PAPERS_PLACEMENT:
        return group.find(row.key.method)
    return group.baseline(measure)
