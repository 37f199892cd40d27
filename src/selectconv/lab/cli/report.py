"""`selectconv report`: one self-contained page about runs."""

import sys
from argparse import Namespace
from pathlib import Path

from selectconv.errors import UsageError
from selectconv.files import write_text
from selectconv.lab.cli.output import check_file
from selectconv.lab.cli.parser import Argument
from selectconv.tables import counted

EXAMPLES = [
    ("selectconv report runs/first", "write report.html"),
    ("selectconv report runs --out all.html", "compare all runs below a folder"),
]
ARGUMENTS = [
    Argument("dirs", "folders of runs, or folders with runs below them", {"nargs": "+"}),
    Argument(
        "--out",
        "file to write (default: report.html)",
        {"metavar": "FILE", "default": "report.html"},
    ),
]


def run(options: Namespace) -> None:
    """Write the page."""
    out = check_file(options.out)
    from selectconv.lab.report.build import build_report
    from selectconv.lab.report.compare.groups import find_duplicates
    from selectconv.lab.report.runs.collect import collect
    from selectconv.lab.report.runs.examine import examine

    found = examine(collect([Path(folder) for folder in options.dirs]))
    if not found.runs:
        raise UsageError("no finished run to report: " + " ".join(found.left_out))
    for line in [*found.left_out, *found.notes, *find_duplicates(found.runs)]:
        print(f"selectconv: {line}", file=sys.stderr)
    page, _ = build_report(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    print(f"{out}: {counted(len(found.runs), 'run')}, {len(page) / 1e6:.1f} MB")
