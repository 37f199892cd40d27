"""What a comparison shows: one line for each question, made from the runs, never by hand.

Held-out runs are asked in a fixed sequence: the loss first, then the error, which counts only if
the losses differ. Runs without held-out images are asked for the error alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from selectconv.lab.report.compare import NO_ROW, Group, Row
from selectconv.lab.report.statistics import (
    LEVEL,
    Comparison,
    compare,
    correct_holm,
    show_p,
)

HOLM, NO_HOLM = " after Holm's correction", " without correction"
WITHIN = " by two one-sided tests"


@dataclass(frozen=True)
class Finding:
    """A question and its answer: a line of the table of findings.

    Attributes:
        row: the method.
        against: what it is compared with.
        measure: "loss" or "error".
        column: the question that it answers in the table of results: "loss", "error" or "no loss";
            empty for the others.
        result: the differences, paired by seed.
        p: of the test, corrected where several methods are asked about.
        test: which test, where that is not the two-sided one; or which correction.
        verdict: what follows.
    """

    row: Row
    against: Row
    measure: str
    column: str
    result: Comparison
    p: float
    test: str
    verdict: str

    @property
    def sentence(self) -> str:
        """All of it in words."""
        result = self.result
        digits, unit = (2, " %") if self.measure == "error" else (4, "")
        return (
            f"{self.row.name} against {self.against.name}, {len(result.seeds)} seeds: "
            f"{self.row.endpoint} {self.measure} {result.before:.{digits}f}{unit} to "
            f"{result.after:.{digits}f}{unit}, a change of {result.change:+.2f} % (95 % interval "
            f"{result.low:+.2f} to {result.high:+.2f} %), p {show_p(self.p)}{self.test}: "
            f"{self.verdict}."
        )


def find_out(group: Group) -> list[Finding]:
    """Compare what can be compared, which needs two common seeds: the first questions first.

    The questions after the first are corrected for their number by Holm's method.
    """
    if group.contest:
        return list(_ask_in_order(group))
    asked = [row for row in group.rows if row not in group.baselines]
    first = [row for row in asked if row.method in group.grid.first]
    others = [row for row in asked if row not in first]
    findings = [finding for row in first for finding in _ask(group, row, [row])]
    findings += [finding for row in others for finding in _ask(group, row, others)]
    return [*findings, *_look_further(group)]


def _ask(group: Group, row: Row, family: list[Row]) -> Iterator[Finding]:
    """Ask about a row, question by question; each counts if those before it found a difference.

    A row with a setting that is gone is compared with the baseline, and then with the same method
    without it. Of the `family` that p is corrected for, rows that have no answer yet count.
    """
    measures = ("loss", "error") if group.endpoint == "held-out" else ("error",)
    without = group.find(row.method) if row.gone else NO_ROW
    questions = [(measure, group.baseline(measure), measure, family) for measure in measures]
    questions += [("", without, measure, [row]) for measure in measures]
    num_missing = sum(len(one.missing) for one in {*family, *group.baselines, without})
    margin = math.nan if group.grid.margin is None else group.grid.margin
    is_asked = True
    for column, against, measure, related in questions:
        found = {
            one: compare(against.measured(measure), one.measured(measure), margin)
            for one in related
        }
        result = found[row]
        if result is None:
            continue
        p = correct_holm({one: 1.0 if its is None else its.p for one, its in found.items()})[row]
        test = HOLM if len(related) > 1 else ""
        verdict = judge(p, result, num_missing, is_asked=is_asked)
        yield Finding(row, against, measure, column, result, p, test, verdict)
        is_asked = is_asked and p < LEVEL
        if column == "error" and group.grid.margin is not None:
            shown = "shown" if result.p_within < LEVEL and not num_missing else "not shown"
            verdict = f"{shown} to be within {margin:g} points"
            yield Finding(
                row, against, measure, "no loss", result, result.p_within, WITHIN, verdict
            )


def _ask_in_order(group: Group) -> Iterator[Finding]:
    """Ask what a comparison of several networks asks, each only if the one before succeeded.

    Those marked `apart` are asked whatever came before, corrected by Holm's method.
    """
    rows, questions = {row.name: row for row in group.rows}, group.contest["questions"]
    asked = [
        (rows[one["arm"]], rows[one["against"]], one.get("measure", "error"), one.get("margin"))
        for one in questions
    ]
    found = [
        compare(against.measured(measure), row.measured(measure), margin or math.nan)
        for row, against, measure, margin in asked
    ]
    apart = correct_holm(
        {
            number: 1.0 if result is None else result.p
            for number, result in enumerate(found)
            if questions[number].get("apart")
        }
    )
    is_asked = True
    for number, result in enumerate(found):
        if result is None:
            continue
        row, against, measure, margin = asked[number]
        num_missing = len(row.missing) + len(against.missing)
        p, test = (result.p_within, WITHIN) if margin else (result.p, "")
        p, test = (apart[number], HOLM) if number in apart else (p, test)
        verdict = judge(p, result, num_missing, is_asked=is_asked or number in apart, margin=margin)
        yield Finding(row, against, measure, "", result, p, test, verdict)
        succeeded = p < LEVEL and (margin is not None or result.change < 0)
        is_asked = is_asked and (succeeded or number in apart)


def judge(
    p: float,
    result: Comparison,
    num_missing: int,
    *,
    is_asked: bool,
    margin: float | None = None,
) -> str:
    """Say what follows from a two-sided test or, with a margin, from two one-sided ones."""
    if num_missing:  # the test is for all planned runs: an interim look decides nothing
        return f"preliminary, {num_missing} planned runs are missing"
    if math.isnan(p):
        return "the differences do not vary, so there is no test"
    if not is_asked:
        return "not tested: the preceding test was not significant"
    if margin is not None:
        return f"{'shown' if p < LEVEL else 'not shown'} to be within {margin:g} points"
    if p >= LEVEL:
        return (
            f"no difference found at the level of {LEVEL}; a change of {result.least:.1f} % would "
            "have been found in 4 of 5 such comparisons"
        )
    return ("lower" if result.change < 0 else "higher") + f" at the level of {LEVEL}"


def _look_further(group: Group) -> Iterator[Finding]:
    """Compare what nobody asked beforehand, and say so: the test loss, and select against +S."""
    select, verdict = group.find("select"), "not among the questions named beforehand"
    asked = [(group.baseline("loss"), "loss")] if group.endpoint == "test" else []
    for against, measure in (*asked, (group.find("shift"), "error")):
        result = compare(against.measured(measure), select.measured(measure))
        if result is not None:
            yield Finding(select, against, measure, "", result, result.p, NO_HOLM, verdict)
