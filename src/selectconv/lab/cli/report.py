"""`selectconv report`: one self-contained page about runs."""

import sys
from argparse import Namespace
from pathlib import Path

from selectconv.errors import UsageError
from selectconv.files import write_text
from selectconv.lab.cli.output import check_file, check_folder
from selectconv.lab.cli.parser import Argument
from selectconv.tables import counted

EXAMPLES = [
    ("selectconv report runs/first", "write report.html"),
    ("selectconv report runs --out all.html", "compare all runs below a folder"),
    ("selectconv report runs --figures figures", "also save the figures, one file each"),
]
ARGUMENTS = [
    Argument("dirs", "folders of runs, or folders with runs below them", {"nargs": "+"}),
    Argument(
        "--out",
        "file to write (default: report.html)",
        {"metavar": "FILE", "default": "report.html"},
    ),
    Argument("--figures", "folder for the page's figures, as SVG files", {"metavar": "DIR"}),
]


def run(options: Namespace) -> None:
    """Write the page."""
    out = check_file(options.out)
    folder = check_folder(options.figures) if options.figures else None
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
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in report.figures.items():
            write_text(folder / name, figure)
        print(f"{folder}: {counted(len(report.figures), 'figure')}")
    print(f"{out}: {counted(len(found.runs), 'run')}, {len(report.page) / 1e6:.1f} MB")
