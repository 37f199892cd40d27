"""What a comparison shows, in sentences: made from the runs, never written by hand."""

import math
from collections.abc import Mapping

from selectconv.lab.report.compare.answers import Answer, Question, ask
from selectconv.lab.report.compare.groups import PAPERS_PLACEMENT, Group, Row, RowKey
from selectconv.lab.report.compare.statistics import LEVEL, compare, show_p


def state_findings(group: Group, answers: Mapping[RowKey, Answer]) -> list[str]:
    """State what was found: first questions, second ones, placements, and one not asked before."""
    baselines = group.baselines
    if not baselines:
        return ["There is no finished run of the baseline: nothing can be compared."]
    rows = sorted(
        (row for row in group.rows.values() if not group.is_baseline(row)),
        key=lambda row: (
            row.key.placement != PAPERS_PLACEMENT, row.key.method not in group.first, row.key,
        ),
    )  # fmt: skip
    lines = []
    for row in rows:
        if row.key in answers:
            lines += _state(group, answers[row.key])
        else:
            own = row.key.placement == PAPERS_PLACEMENT
            other = baselines[0].key.name if own else "the paper's placement"
            lines.append(f"{row.name}: fewer than two seeds in common with {other}.")
    return lines + _look_further(group)


def _look_further(group: Group) -> list[str]:
    """State what was not asked beforehand, and say so: the test loss, and select against +S."""
    shift, select = group.find("shift"), group.find("select")
    pairs = []
    baseline = group.baseline("loss")
    if select is not None and baseline is not None and not group.is_held_out:
        pairs.append((baseline, select, "loss"))
    if select is not None and shift is not None:
        pairs.append((shift, select, "error"))
    lines = []
    for against, row, measure in pairs:
        result = compare(against.measured(measure), row.measured(measure))
        if result is not None:
            text = _describe(group, row, ask(measure, against, row, result, result.p, []))
            lines.append(
                f"Not among the questions named beforehand: {text}, {show_p(result.p)} without "
                "correction."
            )
    return lines


def _state(group: Group, found: Answer) -> list[str]:
    kind = " after Holm's correction" if found.is_corrected else ""
    lines = []
    for asked in (*found.questions, *found.of_rule):
        text = _describe(group, found.row, asked)
        lines.append(f"{text}, {show_p(asked.p)}{kind}: {_verdict(found, asked)}.")
    if found.p_equivalent is not None:
        shown = found.p_equivalent < LEVEL and not found.num_missing
        verdict = "shown" if shown else "not shown"
        lines.append(
            f"{found.row.name} within {group.margin:g} points of {found.error.against.name}'s "
            f"error: {verdict} ({show_p(found.p_equivalent)}, two one-sided tests)."
        )
    return lines


def _describe(group: Group, row: Row, asked: Question) -> str:
    what, result = f"{group.endpoint} {asked.measure}", asked.result
    values = f"{asked.before:.4f} to {asked.after:.4f}"
    if asked.measure == "error":
        values = f"{asked.before:.2f} % to {asked.after:.2f} %"
    return (
        f"{row.name} against {asked.against.name}, {result.n} seeds: {what} {values}, a change "
        f"of {result.change:+.2f} % (95 % interval {result.low:+.2f} to {result.high:+.2f} %)"
    )


def _verdict(found: Answer, asked: Question) -> str:
    if found.num_missing:  # the test is for all planned runs: an interim look decides nothing
        return f"preliminary, {found.num_missing} planned runs are missing"
    if math.isnan(asked.p):
        return "the differences do not vary, so there is no test"
    if not asked.counts:
        return "does not count, since the question before it found no difference"
    if asked.p >= LEVEL:
        return f"no difference found at the level of {LEVEL}"
    return ("lower" if asked.result.change < 0 else "higher") + f" at the level of {LEVEL}"
