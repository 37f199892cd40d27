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
    from selectconv.lab.report.collect import collect
    from selectconv.lab.report.page import build_report

    found = collect([Path(folder) for folder in options.dirs])
    report = build_report(found)
    if not found.runs:
        raise UsageError("no finished run to report: " + " ".join(report.left_out))
    for line in report.left_out:
        print(f"selectconv: {line}", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, report.page)
    print(f"{out}: {counted(len(found.runs), 'run')}, {len(report.page) / 1e6:.1f} MB")
