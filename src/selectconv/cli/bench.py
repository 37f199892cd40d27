"""`selectconv bench`: ratios of ours to the plain way, side by side in one run."""

import json
from typing import Any

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from selectconv.cli.parser import Parser, check_whole
from selectconv.errors import UsageError

CASES = ("step", "alloc", "infer", "data")
OF_MODEL = ("step", "infer")


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("case", type=str, help=f"one of {', '.join(CASES)}")
    parser.add_argument(
        "--repeats", type=Any, default=7, help="measurements of each side, in turn (default: 7)"
    )
    parser.add_argument(
        "--model",
        type=str | None,
        default=None,
        help="step, infer: a network, named as for `selectconv train` (default: densenet40)",
    )
    parser.add_argument(
        "--image-size",
        type=Any,
        default=32,
        help="with --model: height and width of the images (default: 32)",
    )
    parser.add_argument("--compile", action="store_true", help="step: with torch.compile")
    parser.add_argument("--json", action="store_true", help="print one JSON line per case")


def run(options: Namespace) -> int:
    """Measure and print."""
    from selectconv.bench import measure
    from selectconv.checks import check_choice

    check_choice("case", options.case, CASES)
    check_whole(options, "repeats", 1)
    if options.compile and options.case != "step":
        raise UsageError("--compile goes with `bench step` only.")
    check_whole(options, "image_size", 1)
    if options.model is not None and options.case not in OF_MODEL:
        raise UsageError(f"--model goes with `bench {'` and `bench '.join(OF_MODEL)}` only.")
    if options.model is not None and options.compile:
        raise UsageError("--compile measures the trainer's step; it takes no --model.")
    rows: list[dict[str, Any]]
    if options.model is not None:
        measured = getattr(measure, f"measure_{options.case}_of")
        rows = measured(options.model, options.repeats, options.image_size)
    elif options.case == "step":
        rows = measure.measure_step(options.repeats, compile=options.compile)
    else:
        rows = getattr(measure, f"measure_{options.case}")(options.repeats)
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    table = Table(title=f"selectconv bench {options.case} (median of {options.repeats})")
    table.add_column("case")
    for head in ("value", "unit", "from", "to"):
        table.add_column(head, justify="right")
    for row in rows:
        low, high = row["spread"]
        table.add_row(row["case"], f"{row['value']:g}", row["unit"], f"{low:g}", f"{high:g}")
    table.caption = f"selective layers run on: {rows[0]['path']}"
    Console(width=None if Console().is_terminal else 130).print(table)
    return 0
