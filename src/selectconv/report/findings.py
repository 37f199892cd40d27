"""What a comparison shows, in sentences: made from the runs, never written by hand."""

from selectconv.report.groups import METHOD_NAMES, Group, Row
from selectconv.report.statistics import LEVEL, Comparison, compare, correct_holm, summarize


def state_findings(group: Group) -> list[str]:
    """State what was found: first question, second ones, and one that was not asked before."""
    baseline = group.baseline
    if baseline is None:
        return ["There is no finished run of the baseline: nothing can be compared."]
    others = [row for row in group.rows.values() if row is not baseline]
    results = {row.key: _compare(baseline, row) for row in others}
    second = {
        key: result.p
        for key, result in results.items()
        if result is not None and key.method != "select"
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
    by_method = {row.key.method: row for row in others}
    if {"select", "shift"} <= set(by_method):
        shift, select = by_method["shift"], by_method["select"]
        result = _compare(shift, select)
        if result is not None:
            lines.append(
                f"Not among the questions named beforehand: {_sentence(shift, select, result)}, "
                f"p = {result.p:.4f} without correction."
            )
    return lines


def _compare(baseline: Row, row: Row) -> Comparison | None:
    first, second = ({seed: run.error for seed, run in r.runs.items()} for r in (baseline, row))
    return compare(first, second)


def _name(row: Row) -> str:
    return METHOD_NAMES.get(row.key.method, row.key.method)


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
