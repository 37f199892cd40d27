"""Write the summaries of README.md and results/README.md from the runs' files: `make results`."""

from collections.abc import Iterator
from pathlib import Path

from selectconv.report.compare.answers import answer
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
    """Hold select and +S against plain, a line a comparison."""
    lines = [
        "| training | plain | +S | select | select against plain, common seeds | p |",
        "|---|---|---|---|---|---|",
    ]
    for _, group in load_groups():
        plain, select = group.find("plain"), group.find("select")
        if plain is None or select is None:
            continue
        found = answer(group).get(select.key)
        if found is None:
            continue
        result = found.error.result
        missing = f" ({found.num_missing} runs missing)" if found.num_missing else ""
        lines.append(
            f"| {group.title} | {show(plain)} | {show(group.find('shift'))} | {show(select)} "
            f"| {result.change:+.1f} % ({result.low:+.1f} to {result.high:+.1f}) "
            f"| {show_p(found.error.p).removeprefix('p ').removeprefix('= ')}{missing} |"
        )
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
    """Show mean, deviation and n of the test error."""
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


def main() -> None:
    """Rewrite the pages."""
    summaries = {"short": write_short(), "long": write_long()}
    for path, kind in PAGES.items():
        path.write_text(fill(path.read_text(encoding="utf-8"), summaries[kind]), encoding="utf-8")


if __name__ == "__main__":
    main()
