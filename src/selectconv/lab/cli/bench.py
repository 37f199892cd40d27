"""`selectconv bench`: ratios of ours to the plain way, side by side in one run."""

from typing import Any

from jsonargparse import Namespace
from rich.table import Table
from rich.text import Text

from selectconv.checks import check_choice
from selectconv.errors import UsageError
from selectconv.lab.cli.console import print_lines, wide_console
from selectconv.lab.cli.parser import Parser, check_whole
from selectconv.lab.cli.signals import work_begins

CASES = ("step", "alloc", "infer", "data")
RUNTIMES = ("eager", "compile", "onnxruntime")
_RUNS_IN = {"step": RUNTIMES[:2], "infer": RUNTIMES}  # all others: in eager mode only
# The cases that each of these flags goes with.
_GOES_WITH = {
    "model": ("step", "alloc", "infer"),
    "image_size": ("step", "alloc", "infer"),
    "batch_size": ("step", "infer"),
}


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "case",
        type=str,
        help="step (a training step), alloc (an allocation step), infer (inference) or "
        "data (the data pipeline)",
    )
    parser.add_argument(
        "--repeats",
        type=Any,
        default=7,
        help="how often to measure each side; the sides take turns (default: 7)",
    )
    parser.add_argument(
        "--model",
        type=str | None,
        default=None,
        help=f"for {_cases('model')}: the network, as for `selectconv train` (default: "
        "densenet40; for alloc: densenet_bc190)",
    )
    parser.add_argument(
        "--image-size",
        type=Any,
        default=None,
        help=f"for {_cases('image_size')}: height and width of the images (default: 32)",
    )
    parser.add_argument(
        "--batch-size",
        type=Any,
        default=None,
        help=f"for {_cases('batch_size')}: images per call (default: 64)",
    )
    parser.add_argument(
        "--runtime",
        type=str | None,
        default=None,
        help=f"for infer: one of {', '.join(RUNTIMES)}; for step: eager or compile (default: "
        "eager)",
    )
    parser.add_argument("--compile", action="store_true", help="the same as --runtime compile")
    parser.add_argument("--json", action="store_true", help="print one JSON line per case")


def _cases(flag: str) -> str:
    return ", ".join(_GOES_WITH[flag])


def run(options: Namespace) -> int:
    """Measure and print."""
    _check(options)
    from selectconv.core.threads import one_thread

    with one_thread():
        rows = _measure(options)
    if options.json:
        return print_lines(rows)
    wide_console(130).print(_table(options.case, rows))
    return 0


def _check(options: Namespace) -> None:
    check_choice("case", options.case, CASES)
    check_whole(options, "repeats", 1)
    if options.runtime is not None:
        check_choice("runtime", options.runtime, RUNTIMES)
        if options.compile and options.runtime != "compile":
            raise UsageError(f"--compile and --runtime {options.runtime} cannot be combined.")
    runtimes = _RUNS_IN.get(options.case, RUNTIMES[:1])
    if _runtime(options) not in runtimes:
        raise UsageError(
            f"`bench {options.case}` accepts only --runtime {' or '.join(runtimes)}; "
            f"got {_runtime(options)!r}."
        )
    for name, cases in _GOES_WITH.items():
        if getattr(options, name) is None:
            continue
        if options.case not in cases:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is only for `bench {'`, `bench '.join(cases)}`.")
        if name != "model":
            check_whole(options, name, 1)


def _runtime(options: Namespace) -> str:
    return "compile" if options.compile else options.runtime or "eager"


def _measure(options: Namespace) -> list[dict[str, Any]]:
    from selectconv.lab.bench import inference, measure
    from selectconv.lab.bench.selective_cost import Subject

    work_begins()
    given = {
        name: getattr(options, name) for name in _GOES_WITH if getattr(options, name) is not None
    }
    subject = Subject(**given) if given else None
    if options.case == "infer":
        return inference.measure_infer(options.repeats, subject, _runtime(options))
    if options.case == "step":
        is_compiled = _runtime(options) == "compile"
        return measure.measure_step(options.repeats, subject, compile=is_compiled)
    if options.case == "alloc":
        return measure.measure_alloc(options.repeats, **given)
    return measure.measure_data(options.repeats)


def _table(case: str, rows: list[dict[str, Any]]) -> Table:
    """Make the table: one line per case, under a heading where a network or a layout begins."""
    table = Table(title=f"selectconv bench {case}: CPU time on one thread, sides take turns")
    table.add_column("case")
    for head in ("median", "smallest to largest", "n", "multiply-adds"):
        table.add_column(head, justify="right")
    heading = None
    for row in rows:
        about, colon, what = row["case"].rpartition(": ")
        if colon and about != heading:
            heading = about
            table.add_section()
            table.add_row(Text(about, style="bold"))
        low, high = row["spread"]
        macs = row.get("macs_ratio")
        table.add_row(
            f"  {what}" if colon else what,
            f"{row['value']:g} {row['unit']}",
            "-" if row["n"] == 1 else f"{low:g} to {high:g}",
            str(row["n"]),
            "" if macs is None else f"{macs:g} x",
        )
    path = f"selective layers run on: {rows[0]['path']}"
    table.caption = f"x: times as much as plain, or as the line says; {path}"
    return table
