"""What a comparison shows, in sentences: made from the runs, never written by hand."""

import math

from selectconv.report.answers import Answer, answer
from selectconv.report.groups import PAPERS_PLACEMENT, Group, Row
from selectconv.report.statistics import LEVEL, Comparison, compare, show_p, summarize


def state_findings(group: Group) -> list[str]:
    """State what was found: first questions, second ones, placements, and one not asked before."""
    baseline = group.baseline
    if baseline is None:
        return ["There is no finished run of the baseline: nothing can be compared."]
    answers = answer(group)
    rows = sorted(
        (row for row in group.rows.values() if row is not baseline),
        key=lambda row: (
            row.key.placement != PAPERS_PLACEMENT, row.key.method not in group.first, row.key,
        ),
    )  # fmt: skip
    lines = []
    for row in rows:
        if row.key in answers:
            lines.append(_state(answers[row.key]))
        else:
            own = row.key.placement == PAPERS_PLACEMENT
            other = baseline.key.name if own else "the paper's placement"
            lines.append(f"{row.key.name}: fewer than two seeds in common with {other}.")
    return lines + _look_further(group, baseline)


def _look_further(group: Group, baseline: Row) -> list[str]:
    """State what nobody asked beforehand, and say so: the test loss, and select against +S."""
    shift, select = group.find("shift"), group.find("select")
    found: list[tuple[str, Comparison]] = []
    if select is not None:
        losses = [{seed: run.loss for seed, run in row.runs.items()} for row in (baseline, select)]
        seeds = sorted(set(losses[0]) & set(losses[1]))
        result = compare(*losses)
        if result is not None:
            before, after = (summarize([one[seed] for seed in seeds]).mean for one in losses)
            what = f"test loss {before:.4f} to {after:.4f}"
            found.append((_describe(baseline, select, what, result), result))
    if select is not None and shift is not None:
        result = compare(shift.errors, select.errors)
        if result is not None:
            found.append((_sentence(shift, select, result), result))
    return [
        f"Not among the questions named beforehand: {text}, {show_p(result.p)} without correction."
        for text, result in found
    ]


def _state(found: Answer) -> str:
    kind = " after Holm's correction" if found.is_corrected else ""
    sentence = _sentence(found.against, found.row, found.result)
    return f"{sentence}, {show_p(found.p)}{kind}: {_verdict(found)}."


def _sentence(against: Row, row: Row, result: Comparison) -> str:
    seeds = sorted(set(against.runs) & set(row.runs))
    before, after = (summarize([r.errors[seed] for seed in seeds]).mean for r in (against, row))
    return _describe(against, row, f"test error {before:.2f} % to {after:.2f} %", result)


def _describe(against: Row, row: Row, what: str, result: Comparison) -> str:
    return (
        f"{row.key.name} against {against.key.name}, {result.n} seeds: {what}, a change of "
        f"{result.change:+.2f} % (95 % interval {result.low:+.2f} to {result.high:+.2f} %)"
    )


def _verdict(found: Answer) -> str:
    if found.num_missing:  # the test is for all planned runs: a look on the way decides nothing
        return f"preliminary, {found.num_missing} planned runs are missing"
    if math.isnan(found.p):
        return "the differences do not vary, so there is no test"
    if found.p >= LEVEL:
        return f"no difference found at the level of {LEVEL}"
    return ("lower" if found.result.change < 0 else "higher") + f" at the level of {LEVEL}"
