"""Tables of runs beside the paper's figures, as Markdown, CSV and HTML."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean, stdev
from typing import Any

import yaml

from selectconv.lab.report.compare import Group, Row
from selectconv.lab.report.findings import HOLM, Finding, find_out
from selectconv.lab.report.statistics import LEVEL, show_p
from selectconv.lab.train.methods import METHODS

HEADER = (
    "method", "n", "params", "MACs", "MACs, CondenseNet's count", "deployed params",
    "deployed MACs", "time", "held-out loss",
    "change of loss", "p, loss", "held-out error %", "test error %, last epoch", "best epoch",
    "change", "95 % interval", "p", "p, no loss", "smallest visible change", "slots moved",
    "slots closed",
    "paper: error %", "paper: change", "paper: params", "paper: FLOPs", "missing",
)  # fmt: skip
# The figures that the paper prints: table -> model -> data -> method.
PAPER: dict[str, Any] = yaml.safe_load(
    (files("selectconv.lab.report") / "paper.yaml").read_text(encoding="utf-8")
)
_PRINTED = {"error": "error %", "change": "change", "params": "params", "flops": "FLOPs"}
_CONDENSENET_COUNT = "table2"  # the table whose FLOPs are by that counter


@dataclass(frozen=True)
class ResultTable:
    """A table that is ready to be written.

    Attributes:
        title: what it is about.
        caption: scale, n, test, and how to read it.
        rows: text by the names of `HEADER`; a name that is missing is an empty cell.
        findings: what it shows, in sentences.
    """

    title: str
    caption: str
    rows: list[dict[str, str]]
    findings: list[str]

    @property
    def header(self) -> list[str]:
        """The columns that are not empty."""
        return [name for name in HEADER if any(row.get(name) for row in self.rows)]

    def to_markdown(self) -> str:
        """Write it as Markdown."""
        header = self.header
        lines = [header, ["---"] * len(header)]
        lines += [[row.get(name, "").replace("|", "\\|") for name in header] for row in self.rows]
        table = ["| " + " | ".join(cells) + " |" for cells in lines]
        found = [f"- {finding}" for finding in self.findings]
        return "\n".join([f"**{self.title}**", "", *table, "", *found, "", self.caption, ""])


def write_csv(tables: Sequence[ResultTable]) -> str:
    """Write tables as one CSV with a column for the title."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("table", *HEADER), lineterminator="\n")
    writer.writeheader()
    for table in tables:
        writer.writerows({"table": table.title, **row} for row in table.rows)
    return text.getvalue()


def build_table(group: Group) -> ResultTable:
    """Build the table of one comparison, beside the paper's figures."""
    of_model = PAPER[group.grid.table].get(group.config["model"], {})
    quoted = of_model.get(group.config["data"], {})
    findings = find_out(group)
    rows = []
    for row in group.rows:
        cells = {"method": row.name + _selection_words(row), "n": str(len(row.runs))}
        cells |= _measured(row, has_condensenet_count=group.grid.table == _CONDENSENET_COUNT)
        cells |= _compared([finding for finding in findings if finding.row is row])
        paper = (
            {"params": of_model.get("params", ""), **quoted[row.method]}
            if row.method in quoted
            else {"error": "not printed"}
        )
        cells |= {f"paper: {_PRINTED[key]}": value for key, value in paper.items()}
        rows.append({**cells, "missing": _missing(row)})
    lines = [finding.sentence for finding in findings] or ["There are no pairs to compare yet."]
    return ResultTable(group.title, _caption(group, findings), rows, lines)


def _caption(group: Group, findings: list[Finding]) -> str:
    """Say the scale, n, the test, and how to read the table."""
    grid = group.grid
    counts = sorted({len(row.runs) for row in group.rows})
    n = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    images = max((run.holdout["images"] for run in group.runs if run.holdout), default=0)
    signs = [
        f"{info.paper_name}: {info.words.partition('; {goal}')[0]}"  # rows have their own goals
        for info in (METHODS[name] for name in dict.fromkeys(row.method for row in group.rows))
        if info.paper_name[0] == "+"
    ]
    sentences = {
        f"Scale: {grid.scale}.": grid.scale,
        f"n = {n} seed{'' if n == '1' else 's'}: mean ± sample standard deviation.": True,
        f"Held-out: the last weights, tested on the {images:,} images that were not trained on; "
        "change and p refer to these.": group.endpoint == "held-out",
        "Deployed: what `compress` writes, with the small convs that shift.": True,
        "Time: one run's network in ONNX Runtime on one thread, as a multiple of the first "
        "row's.": any(run.time for run in group.runs),
        "Smallest visible change: the true change of error that the test would have found with a "
        "probability of 80 %.": True,
        "Test error: that of the last epoch; the best epoch was chosen on the test set. Change: "
        "that of the mean over common seeds, relative to the baseline.": True,
        f"p, no loss: two one-sided tests that the error is within {grid.margin or 0:g} points of "
        "the baseline's.": grid.margin and not group.contest,
        group.contest.get("test")
        or grid.test
        or "p: two-sided paired t-test, paired by seed.": True,
        "Where the findings say so, p is after Holm's correction.": any(
            finding.test == HOLM for finding in findings
        ),
        f"Methods: {'; '.join(signs)}.": signs,
        "Paper: its numbers, quoted as printed, for its own networks, images and epochs.": True,
    }
    return " ".join(sentence for sentence, is_said in sentences.items() if is_said)


def _selection_words(row: Row) -> str:
    """Name the settings that decide how much is selected, where its name does not."""
    selection = row.settings
    budget = [name for name in ("target_macs", "target_params") if selection.get(name)]
    names = [name for name in (*(budget or ["gamma"]), "grace") if name not in row.named]
    shown = {name: selection[name] for name in names if selection.get(name)}
    if selection.get("shifts") == "whole" and "shifts" not in row.named:
        shown["shifts"] = "whole"
    words = [f"{k} {v if isinstance(v, str) else f'{v:g}'}" for k, v in shown.items()]
    return f" [{', '.join(words)}]" if words else ""


def _measured(row: Row, *, has_condensenet_count: bool) -> dict[str, str]:
    """Return what the runs of a row measured: sizes, losses, errors and slots."""
    runs = list(row.runs.values())
    if not runs:
        return {"test error %, last epoch": "no finished run"}
    cells: dict[str, str] = {}
    for words, costs in (("", row.costs("size")), ("deployed ", row.costs("deployed"))):
        cells |= {f"{words}params": "weights not kept", f"{words}MACs": "weights not kept"}
        if costs:
            cells[f"{words}params"] = f"{fmean(cost.params for cost in costs):,.0f}"
            cells[f"{words}MACs"] = f"{fmean(cost.macs for cost in costs) / 1e6:,.2f}M"
    if has_condensenet_count and row.costs("size"):
        macs = fmean(cost.macs_cn for cost in row.costs("size"))
        cells["MACs, CondenseNet's count"] = f"{macs / 1e6:,.2f}M"
    cells["time"] = ", ".join(f"{run.time['value']:.2f}" for run in runs if run.time)
    if row.endpoint == "held-out":
        cells["held-out loss"] = show_spread(row.measured("loss").values(), 4)
        cells["held-out error %"] = show_spread(row.measured("error").values())
    cells["test error %, last epoch"] = show_spread([run.error for run in runs])
    cells["best epoch"] = show_spread(min(row["test_error"] for row in run.metrics) for run in runs)
    for name in ("moved", "closed"):
        mean = fmean(run.metrics[-1][name] for run in runs)
        is_whole = mean.is_integer() or mean >= 100
        cells[f"slots {name}"] = f"{mean:,.0f}" if is_whole else f"{mean:.1f}"
    return cells


def _compared(findings: list[Finding]) -> dict[str, str]:
    """Return what the findings of a row fill in."""
    cells: dict[str, str] = {}
    for finding in findings:
        p, result = show_p(finding.p).removeprefix("= "), finding.result
        least = f"{result.least:.1f} %"
        unseen = {"smallest visible change": least} if finding.p >= LEVEL else {}
        change, interval = f"{result.change:+.2f} %", f"{result.low:+.2f} to {result.high:+.2f} %"
        cells |= {
            "loss": {"change of loss": change, "p, loss": p},
            "error": {"change": change, "95 % interval": interval, "p": p, **unseen},
            "no loss": {"p, no loss": p},
            "": {},
        }[finding.column]
    return cells


def _missing(row: Row) -> str:
    """Say which runs are missing and why; a reason that many share is given once."""
    missing = row.missing.items()
    names = {reason: [name for name, why in missing if why == reason] for _, reason in missing}
    return "; ".join(
        f"{', '.join(same)}: {reason}"
        if len(same) < 3
        else f"{same[0]} to {same[-1]} ({len(same)} runs): {reason}"
        for reason, same in names.items()
    )


def show_spread(values: Iterable[float], digits: int = 2) -> str:
    """Show mean ± standard deviation."""
    known = list(values)
    spread = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{fmean(known):.{digits}f}{spread}"
