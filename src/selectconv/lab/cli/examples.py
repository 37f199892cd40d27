"""Examples of each verb, which its `--help` ends with, and the way in for someone new.

Nothing is imported here: `selectconv` alone and `selectconv --help` answer at once.
"""

# The command, and what it is for. {run} is a run's folder, in `next_commands`.
EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "train": [
        (
            "selectconv train --data digits --gamma 0.05 --grace 1 --epochs 10",
            "a first run, about a minute",
        ),
        ("selectconv train --data cifar10 --dry-run", "show the plan, and how long it would take"),
        ("selectconv train --data imagefolder:photos --gamma 0.01", "your own images"),
        ("selectconv train --model timm:resnet18 --data cifar10", "another network"),
        ("selectconv train --method dealloc --target-macs 0.5", "half of the multiply-adds"),
        ("selectconv train --out runs/first --resume", "continue an interrupted run"),
    ],
    "eval": [
        ("selectconv eval runs/first", "error and loss on the test images"),
        ("selectconv eval runs/first --holdout", "the same on all images that were not trained on"),
    ],
    "compress": [
        ("selectconv compress runs/first", "write runs/first/compressed.safetensors"),
        (
            "selectconv compress runs/first --table",
            "also compare its speed with the plain network's",
        ),
    ],
    "export": [("selectconv export runs/first --out first.onnx", "an ONNX file")],
    "report": [
        ("selectconv report runs/first", "write report.html"),
        ("selectconv report runs --out all.html", "compare all runs below a folder"),
    ],
    "reproduce": [
        ("selectconv reproduce ablation", "check in a few minutes that everything runs"),
        (
            "selectconv reproduce table1 --scale full --dry-run",
            "how long the paper's runs would take",
        ),
        ("selectconv reproduce ablation --scale reduced --jobs 2", "hours, two runs at a time"),
        (
            "selectconv reproduce table1 --scale reduced --only 'densenet40-cifar10-*'",
            "one row of the table",
        ),
    ],
    "data": [
        ("selectconv data list", "the data sets, and where they were found"),
        ("selectconv data list imagefolder:photos", "your own images: classes, sizes, counts"),
        ("selectconv data fetch fashion-mnist", "fetch one into the cache"),
    ],
    "models": [("selectconv models", "the networks, with parameters and multiply-adds")],
    "bench": [
        ("selectconv bench step", "compare a selective training step with a plain one"),
        ("selectconv bench infer --model timm:resnet18", "compare inference, for another network"),
    ],
}

_NEXT = [
    ("selectconv eval {run}", "test its weights again"),
    ("selectconv report {run}", "tables and figures of the run"),
    ("selectconv compress {run}", "a smaller network with the same outputs"),
    ("selectconv export {run}", "an ONNX file"),
]

_START = [
    (
        "selectconv train --data digits --gamma 0.05 --grace 1 --epochs 10",
        "a first run, about a minute",
    ),
    ("selectconv train --help", "the settings, with examples"),
    ("selectconv data list", "the data sets; imagefolder:DIR is for your own images"),
    ("selectconv models", "the networks"),
    ("selectconv --help", "all verbs"),
]


def show_examples(verb: str) -> str:
    """Return the end of a verb's `--help`."""
    return "\n".join(["examples:", *_lines(EXAMPLES[verb])])


def show_start() -> str:
    """Return what `selectconv` alone says."""
    lines = _lines(_START)
    return "\n".join(["selectconv trains networks that use the parameters they have. Begin with:",
                      *lines])  # fmt: skip


def next_commands(run: str, *, is_tested: bool) -> str:
    """Return what can be done with a finished run.

    Args:
        run: its folder.
        is_tested: whether it has test images, which `eval` and `report` need.
    """
    needing_tests = ("eval", "report")
    chosen = [
        (command.format(run=run), text)
        for command, text in _NEXT
        if is_tested or command.split()[1] not in needing_tests
    ]
    return "\n".join(["next:", *_lines(chosen)])


def _lines(pairs: list[tuple[str, str]]) -> list[str]:
    width = max(len(command) for command, _ in pairs)
    return [f"  {command:{width}}  {text}" for command, text in pairs]
