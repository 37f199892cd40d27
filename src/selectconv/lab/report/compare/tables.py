"""Tables of runs beside the paper's figures, as Markdown, CSV and HTML."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import compress
from typing import Any

import yaml
from markupsafe import Markup

from selectconv.lab.report.compare.answers import Answer, answer
from selectconv.lab.report.compare.findings import state_findings
from selectconv.lab.report.compare.groups import PAPERS_PLACEMENT, Group, Row, RowKey
from selectconv.lab.report.compare.statistics import show_p_alone, summarize
from selectconv.lab.report.html import render
from selectconv.lab.report.runs.size import measure_size
from selectconv.lab.train.methods import METHODS

HEADER = (
    "method", "n", "params", "MACs", "MACs, CondenseNet's count", "held-out loss",
    "change of loss", "p, loss", "held-out error %", "test error %, last epoch", "best epoch",
    "change", "95 % interval", "p", "p, no loss", "slots moved", "slots closed",
    "paper: error %", "paper: change", "paper: params", "paper: FLOPs", "missing",
)  # fmt: skip
_CONDENSENET_COUNT = "table2"  # the table whose FLOPs are by that counter


@dataclass(frozen=True)
class ResultTable:
    """A table that is ready to be written.

    Attributes:
        title: what it is about.
        caption: scale, n, test, and how to read it.
        rows: cells as text, under `HEADER`.
        findings: what it shows, in sentences.
    """

    title: str
    caption: str
    rows: list[tuple[str, ...]]
    findings: list[str]

    def to_markdown(self) -> str:
        """Write it as Markdown, without columns that are empty."""
        header, rows = self._filled()
        lines = [f"**{self.title}**", "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "---|" * len(header))
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
        ]
        found = [f"- {finding}" for finding in self.findings]
        return "\n".join([*lines, "", *found, "", self.caption, ""])

    def to_html(self) -> Markup:
        """Write it as HTML, without columns that are empty."""
        header, rows = self._filled()
        return render(
            "table.html",
            title=self.title,
            caption=self.caption,
            header=header,
            rows=rows,
            findings=self.findings,
        )

    def _filled(self) -> tuple[list[str], list[list[str]]]:
        filled = [any(cells) for cells in zip(*self.rows, strict=True)]
        header = list(compress(HEADER, filled))
        return header, [list(compress(row, filled)) for row in self.rows]


def write_csv(tables: Sequence[ResultTable]) -> str:
    """Write tables as one CSV with a column for the title."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("table", *HEADER))
    for table in tables:
        writer.writerows((table.title, *row) for row in table.rows)
    return text.getvalue()


@cache
def paper_figures() -> dict[str, Any]:
    """Read the figures that the paper prints: table -> model -> data -> method."""
    text = (files("selectconv.lab.report") / "paper.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def build_table(
    group: Group, *, table: str = "table1", scale: str = "", test: str = ""
) -> ResultTable:
    """Build the table of one comparison.

    Args:
        group: its runs.
        table: where the paper's figures stand: a key of `paper.yaml`.
        scale: of the grid; empty for runs that belong to none.
        test: the statistical test as named before the runs; empty: say what was done.
    """
    of_model = paper_figures().get(table, {}).get(group.key.model, {})
    quoted = of_model.get(group.key.data, {})
    answers = answer(group)
    rows: list[tuple[str, ...]] = []
    for key, row in group.rows.items():
        paper = quoted.get(key.method, {})
        rows.append(
            (
                row.name + _selection_words(row),
                str(len(row.runs)),
                *_sizes(row, has_condensenet_count=table == _CONDENSENET_COUNT),
                *_held_out_loss(row, answers.get(key)),
                *_errors(row),
                *_change(answers.get(key)),
                _equivalence(answers.get(key)),
                *_slots(row),
                paper.get("error", "not printed"),
                paper.get("change", ""),
                paper.get("params", of_model.get("params", "")) if paper else "",
                paper.get("flops", ""),
                _missing(row),
            )
        )
    caption = _write_caption(group, answers, scale, test)
    return ResultTable(group.title, caption, rows, state_findings(group, answers))


def _write_caption(group: Group, answers: Mapping[RowKey, Answer], scale: str, test: str) -> str:
    """Say the scale, n, the test, and how to read the table."""
    counts = sorted({len(row.runs) for row in group.rows.values()})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    words = [f"Scale: {scale}."] if scale else []
    words.append(f"{n} seed{'' if counts == [1] else 's'}: mean ± sample standard deviation.")
    if group.is_held_out:
        runs = [run for row in group.rows.values() for run in row.runs.values()]
        images = max(run.holdout["images"] for run in runs if run.holdout is not None)
        words.append(
            f"Held-out: the last weights, tested on the {images:,} images that were not trained "
            "on; change and p refer to these."
        )
    words.append(
        "Test error: that of the last epoch; the best epoch was chosen on the test set. Change: "
        "that of the mean over common seeds, relative to the baseline."
    )
    if group.margin is not None:
        words.append(
            f"p, no loss: two one-sided tests that the error is within {group.margin:g} points of "
            "the baseline's."
        )
    words.append(test or "p: two-sided paired t-test, paired by seed.")
    if any(found.is_corrected for found in answers.values()):
        words.append("Where the findings say so, p is after Holm's correction.")
    if any(key.placement != PAPERS_PLACEMENT for key in group.rows):
        words.append(
            "Runs with another placement are compared with the paper's placement, not with the "
            "baseline."
        )
    names = dict.fromkeys(key.method for key in sorted(group.rows))
    methods = [METHODS[name] for name in names if name in METHODS]
    signs = [
        f"{info.paper_name}: {info.words.partition('; {goal}')[0]}"  # rows have their own goals
        for info in methods
        if info.paper_name[0] == "+"
    ]
    if signs:
        words.append(f"Methods: {'; '.join(signs)}.")
    words.append("Paper: its numbers, quoted as printed, for its own networks, images and epochs.")
    return " ".join(words)


def _selection_words(row: Row) -> str:
    selection = row.key.selection
    budget = [name for name in ("target_macs", "target_params") if selection.get(name)]
    names = [name for name in (*(budget or ["gamma"]), "grace") if name not in row.told]
    words = [f"{name} {_short(selection[name])}" for name in names if selection.get(name)]
    return f" [{', '.join(words)}]" if words else ""


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _missing(row: Row) -> str:
    """Say which runs are missing and why; a reason that many share is given once."""
    names: dict[str, list[str]] = {}
    for name, reason in row.missing.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(
        f"{', '.join(same)}: {reason}"
        if len(same) < 3
        else f"{same[0]} to {same[-1]} ({len(same)} runs): {reason}"
        for reason, same in names.items()
    )


def _sizes(row: Row, *, has_condensenet_count: bool) -> tuple[str, str, str]:
    if not row.runs:
        return "", "", ""
    measured = [measure_size(run) for run in row.runs.values()]
    sizes = [size for size in measured if size is not None]
    if not sizes:
        return "weights not kept", "weights not kept", ""
    params, macs, macs_cn = (
        summarize([getattr(size, name) for size in sizes]).mean
        for name in ("params", "macs", "macs_cn")
    )
    counted = f"{macs_cn / 1e6:,.2f}M" if has_condensenet_count else ""
    return f"{params:,.0f}", f"{macs / 1e6:,.2f}M", counted


def _held_out_loss(row: Row, found: Answer | None) -> tuple[str, str, str]:
    if not row.is_held_out or not row.runs:
        return "", "", ""
    loss = _spread(list(row.measured("loss").values()), 4)
    if found is None or found.loss is None:
        return loss, "", ""
    return loss, f"{found.loss.result.change:+.2f} %", show_p_alone(found.loss.p)


def _errors(row: Row) -> tuple[str, str, str]:
    if not row.runs:
        return "", "no finished run", ""
    runs = row.runs.values()
    return (
        _spread(list(row.measured("error").values())) if row.is_held_out else "",
        _spread([run.error for run in runs]),
        _spread([run.best_error for run in runs]),
    )


def _spread(values: Sequence[float], digits: int = 2) -> str:
    """Show mean ± standard deviation."""
    summary = summarize(values)
    spread = "" if math.isnan(summary.std) else f" ± {summary.std:.{digits}f}"
    return f"{summary.mean:.{digits}f}{spread}"


def _equivalence(found: Answer | None) -> str:
    return "" if found is None or found.p_equivalent is None else show_p_alone(found.p_equivalent)


def _change(found: Answer | None) -> tuple[str, str, str]:
    if found is None:
        return "", "", ""
    result = found.error.result
    return (
        f"{result.change:+.2f} %",
        f"{result.low:+.2f} to {result.high:+.2f} %",
        show_p_alone(found.error.p),
    )


def _slots(row: Row) -> tuple[str, str]:
    if not row.runs:
        return "", ""
    moved, closed = (
        summarize([float(run.metrics[-1][name]) for run in row.runs.values()]).mean
        for name in ("moved", "closed")
    )
    return _show_count(moved), _show_count(closed)


def _show_count(mean: float) -> str:
    return f"{mean:,.0f}" if mean.is_integer() or mean >= 100 else f"{mean:.1f}"
