"""`selectconv bench`: ratios of ours to the plain way, side by side in one run."""

from argparse import Namespace

from selectconv.checks import check_choice
from selectconv.errors import UsageError
from selectconv.lab.cli.output import print_rows
from selectconv.lab.cli.parser import JSON, Argument, count

EXAMPLES = [
    ("selectconv bench step", "compare a selective training step with a plain one"),
    ("selectconv bench infer --model timm:resnet18", "compare inference, for another network"),
]
# The runtimes of each case.
_CASES = {
    "step": ("eager", "compile"),
    "alloc": ("eager",),
    "infer": ("eager", "compile", "onnxruntime"),
    "data": ("eager",),
}
ARGUMENTS = [
    Argument(
        "case",
        "step (a training step), alloc (an allocation step), infer (inference) or data (the data "
        "pipeline)",
    ),
    count("--repeats", "how often to measure each side; the sides take turns (default: 7)", 7),
    Argument(
        "--model",
        "the network, as for `selectconv train` (default: densenet40; for alloc: densenet_bc190)",
    ),
    count("--image-size", "height and width of the images (default: 32)"),
    count("--batch-size", "images per call (default: 64)"),
    Argument(
        "--runtime",
        "eager; for step and infer also compile; for infer also onnxruntime (default: eager)",
        {"default": "eager"},
    ),
    JSON,
]


def run(options: Namespace) -> None:
    """Measure and print."""
    check_choice("case", options.case, _CASES)
    check_choice("runtime", options.runtime, _CASES[options.case])
    given = {
        name: getattr(options, name)
        for name in ("model", "image_size", "batch_size")
        if getattr(options, name) is not None
    }
    if given and options.case == "data":
        raise UsageError("--model, --image-size and --batch-size do not go with `bench data`.")

    from selectconv.core.threads import num_threads
    from selectconv.lab.bench.cases import (
        Subject,
        measure_alloc,
        measure_data,
        measure_infer,
        measure_step,
    )

    measure = {
        "step": measure_step,
        "alloc": measure_alloc,
        "infer": measure_infer,
        "data": measure_data,
    }[options.case]
    if options.case == "alloc":
        given = {"model": "densenet_bc190", **given}
    with num_threads(1):
        rows = measure(Subject(**given), options.repeats, options.runtime)
    print_rows(
        rows,
        as_json=options.json,
        columns=("case", "value", "unit", "n", "spread", "macs_ratio"),
    )
    if not options.json:
        print(f"CPU time on one thread, sides in turn; selective layers: {rows[0]['path']}")
