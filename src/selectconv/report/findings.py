"""What a comparison shows, in sentences: made from the runs, never written by hand."""

from selectconv.report.groups import PAPERS_PLACEMENT, Group, Row
from selectconv.report.statistics import LEVEL, Comparison, compare, correct_holm, summarize


def state_findings(group: Group) -> list[str]:
    """State what was found: first question, second ones, placements, and one not asked before."""
    baseline = group.baseline
    if baseline is None:
        return ["There is no finished run of the baseline: nothing can be compared."]
    compared = [row for row in group.rows.values() if row is not baseline]
    others = [row for row in compared if row.key.placement == PAPERS_PLACEMENT]
    results = {row.key: _compare(baseline, row) for row in others}
    second = {
        key: result.p
        for key, result in results.items()
        if result is not None and key.is_second_question
    }
    adjusted = correct_holm(second)
    lines = []
    for row in sorted(others, key=lambda row: (row.key.method != "select", row.key)):
        result = results[row.key]
        if result is None:
            lines.append(f"{_name(row)}: fewer than two seeds in common with {_name(baseline)}.")
            continue
        p = adjusted.get(row.key, result.p)
        kind = " after Holm's correction" if row.key in adjusted and len(adjusted) > 1 else ""
        lines.append(
            f"{_sentence(baseline, row, result)}, p = {p:.4f}{kind}: "
            f"{_verdict(result, p, len(baseline.missing) + len(row.missing))}."
        )
    for row in compared:
        if row not in others:
            lines.append(_state_placement(group, row))
    shift, select = group.find("shift"), group.find("select")
    if shift is not None and select is not None:
        result = _compare(shift, select)
        if result is not None:
            lines.append(
                f"Not among the questions named beforehand: {_sentence(shift, select, result)}, "
                f"p = {result.p:.4f} without correction."
            )
    return lines


def _state_placement(group: Group, row: Row) -> str:
    """Hold a placement against the paper's, with the same method."""
    ours = group.find(row.key.method)
    result = None if ours is None else _compare(ours, row)
    if ours is None or result is None:
        return f"{_name(row)}: fewer than two seeds in common with the paper's placement."
    verdict = _verdict(result, result.p, len(ours.missing) + len(row.missing))
    return f"{_sentence(ours, row, result)}, p = {result.p:.4f}: {verdict}."


def _compare(baseline: Row, row: Row) -> Comparison | None:
    first, second = ({seed: run.error for seed, run in r.runs.items()} for r in (baseline, row))
    return compare(first, second)


def _name(row: Row) -> str:
    return row.key.name


def _sentence(baseline: Row, row: Row, result: Comparison) -> str:
    seeds = sorted(set(baseline.runs) & set(row.runs))
    before, after = (
        summarize([r.runs[seed].error for seed in seeds]).mean for r in (baseline, row)
    )
    return (
        f"{_name(row)} against {_name(baseline)}, {result.n} seeds: test error {before:.2f} % to "
        f"{after:.2f} %, a change of {result.change:+.2f} % (95 % interval {result.low:+.2f} to "
        f"{result.high:+.2f} %)"
    )


def _verdict(result: Comparison, p: float, num_missing: int) -> str:
    if num_missing:  # the test is named for all planned runs: a look on the way decides nothing
        return f"preliminary, {num_missing} planned runs are missing"
    if p >= LEVEL:
        return f"no difference at the level of {LEVEL}"
    return ("lower" if result.change < 0 else "higher") + f" at the level of {LEVEL}"
