"""Write the summaries of README.md and results/README.md from the runs' files: `make results`."""

import json
from collections.abc import Iterator
from pathlib import Path

from selectconv.report.compare.answers import Question, answer
from selectconv.report.compare.findings import state_findings
from selectconv.report.compare.groups import Group, Row, group_runs
from selectconv.report.compare.statistics import show_p, summarize
from selectconv.report.runs.collect import collect
from selectconv.reproduce.grid import TABLES, load_grid

ROOT = Path(__file__).resolve().parent.parent
PAGES = {ROOT / "README.md": "short", ROOT / "results" / "README.md": "long"}
BEGIN, END = "<!-- from here: results/make_summary.py -->", "<!-- to here -->"
SCALE = "reduced"


def load_groups() -> Iterator[tuple[str, Group]]:
    """Yield the comparisons of every grid that has runs here, with the grid's name."""
    for table in TABLES:
        grid, folder = load_grid(table, SCALE), ROOT / "results" / table / "runs"
        if not folder.is_dir():
            continue
        runs = collect([folder]).runs
        for group in group_runs(
            runs, grid.missing({run.name for run in runs}, {}), grid.first, grid.margin
        ):
            yield table, group


def write_short() -> str:
    """Compare select with plain, one line per training."""
    lines = [
        "| training | plain | select | change of error | p | change of loss | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, group in load_groups():
        select = group.find("select")
        found = None if select is None else answer(group).get(select.key)
        if select is None or found is None:
            continue
        missing = f" ({found.num_missing} runs missing)" if found.num_missing else ""
        cells = [f"{group.title}{missing}", show(found.error.against), show(select)]
        for question in (found.error, found.loss):
            cells += ["-", "-"] if question is None else show_question(question)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show_question(question: Question) -> list[str]:
    """Show a change with its interval, and p."""
    result = question.result
    p = show_p(question.p).removeprefix("p ").removeprefix("= ")
    return [f"{result.change:+.1f} % ({result.low:+.1f} to {result.high:+.1f})", p]


def write_screening() -> str:
    """List every trial of the screening."""
    lines = [
        "| setting | method | seed | weight decay | lr | gamma | grace | held-out error % | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for text in (ROOT / "results" / "screening.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        network = row["model"].rpartition(":")[2]
        cells = [
            f"{network}, {row['data']}, {row['images']:,} x {row['epochs']}",
            row["method"] + (", growth by gradient" if row.get("growth") == "gradient" else ""),
            *(str(row[name]) for name in ("seed", "weight_decay", "lr")),
            *(str(row.get(name, "-")) for name in ("gamma", "grace")),
            f"{row['holdout_error']:.2f}",
            f"{row['holdout_loss']:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_long() -> str:
    """Say all findings, grid by grid."""
    lines: list[str] = []
    heading = ""
    for table, group in load_groups():
        title = f"### [`{table}`]({table}/tables.md)"
        if title != heading:
            lines += [title, ""]
            heading = title
        lines += [f"{group.title}:", "", *(f"- {line}" for line in state_findings(group)), ""]
    return "\n".join(lines).rstrip()


def show(row: Row | None) -> str:
    """Show mean, deviation and n of the error."""
    if row is None:
        return "-"
    summary = summarize(list(row.measured("error").values()))
    return f"{summary.mean:.2f} ± {summary.std:.2f} % ({summary.n})"


def fill(page: str, summary: str) -> str:
    """Put a summary between the marks of a page."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page lacks one of the marks {BEGIN!r} and {END!r}.")
    return f"{before}{begin}\n{summary}\n{end}{after}"


def write_pages() -> dict[Path, str]:
    """Write the pages, with what the runs say between their marks."""
    long = f"{write_long()}\n\n### Every trial of the screening\n\n{write_screening()}"
    summaries = {"short": write_short(), "long": long}
    return {
        path: fill(path.read_text(encoding="utf-8"), summaries[kind])
        for path, kind in PAGES.items()
    }


def main() -> None:
    """Rewrite the pages."""
    for path, text in write_pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
