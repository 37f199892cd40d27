"""`selectconv train`: one run, from its settings to its folder."""

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from selectconv.checks import check_choice
from selectconv.errors import DataError, RunError, SelectConvError, UsageError
from selectconv.lab.cli import signals
from selectconv.lab.cli.output import check_folder
from selectconv.lab.cli.parser import Argument, list_commands, switch
from selectconv.lab.train.config import (
    TrainConfig,
    describe_setting,
    resolve,
    setting_names,
    setting_types,
)
from selectconv.lab.train.run_folder import (
    CHECKPOINT,
    CONFIG,
    MANIFEST,
    METRICS,
    RunFolder,
    check_free,
    is_first_process,
    locked,
)

EXAMPLES = [
    (
        "selectconv train --data digits --gamma 0.05 --grace 1 --epochs 10",
        "a first run, about a minute",
    ),
    ("selectconv train --data cifar10 --dry-run", "show the plan, and how long it would take"),
    ("selectconv train --data imagefolder:photos --gamma 0.01", "your own images"),
    ("selectconv train --model timm:resnet18 --data cifar10", "another network"),
    ("selectconv train --method dealloc --target-macs 0.5", "half of the multiply-adds"),
    ("selectconv train --out runs/first --resume", "continue an interrupted run"),
]

# The titles of `--help`: what people change first, then the settings by their groups.
_FIRST = ("model", "data", "method", "epochs", "gamma", "seed")
_TITLES = {
    "selection": "how channels are selected",
    "training": "the training",
    "tuning": "the optimizer",
    "task": "the network",
    "aside": "the machine",
}


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number: PyYAML follows YAML 1.1, which asks for 1.0e-3."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_value(text: str) -> Any:
    """Read a flag as YAML; text that is not YAML is left to the check of the setting."""
    try:
        return yaml.load(text, _Loader) if text else text
    except yaml.YAMLError:
        return text


def _declare(title: str, names: Iterable[str]) -> list[Argument]:
    """Declare the flags of settings."""
    arguments, types = [], setting_types()
    for name in names:
        options: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
        if types[name] is bool:
            options = {"metavar": "true|false", "nargs": "?", "const": True}
        options["type"] = str if types[name] is str else _read_value
        flag = "--" + name.replace("_", "-")
        arguments.append(Argument(flag, describe_setting(name), options, title))
    return arguments


ARGUMENTS = [
    *_declare("what people change first", _FIRST),
    Argument(
        "--config",
        "YAML file with any of these settings; flags override it",
        {"metavar": "FILE", "action": "append", "default": []},
    ),
    Argument("--out", "folder of the run (default: runs/NAME)", {"metavar": "DIR"}),
    switch("--resume", "continue the run in --out"),
    switch("--overwrite", "delete the run in --out, and start again"),
    switch("--dry-run", "print the plan of the run, and stop"),
    *(
        argument
        for group, title in _TITLES.items()
        for argument in _declare(title, [n for n in setting_names(group) if n not in _FIRST])
    ),
]


def read_settings(options: Namespace) -> dict[str, Any]:
    """Return the settings of the config files and of the flags, which win.

    Raises:
        UsageError: a file cannot be read, or does not hold settings.
    """
    given: dict[str, Any] = {}
    flags = {name: getattr(options, name) for name in setting_names()}
    for content in [*map(_read_file, options.config), flags]:
        given |= {name: value for name, value in content.items() if value is not None}
    types = setting_types()
    return {
        # 1 is written 1.0 where a fraction is meant.
        name: float(value)
        if types.get(name) in (float, float | str) and type(value) is int
        else value
        for name, value in given.items()
    }


def _read_file(path: str) -> dict[str, Any]:
    """Read a config file."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--config: {path} cannot be read: {reason}.") from error
    if not isinstance(content, dict):
        came = "the file is empty" if content is None else f"got {content!r:.200}"
        raise UsageError(
            f"--config: {path} must be YAML with one setting per line, such as `epochs: 3`; {came}."
        )
    return content


def run(options: Namespace) -> None:
    """Train."""
    given = read_settings(options)
    if options.resume and options.overwrite:
        raise UsageError(
            "--resume and --overwrite cannot be combined: continue the run, or start again."
        )
    config, folder = choose_run(given, options.out, resume=options.resume)
    is_first = is_first_process()  # which looks after the folder
    console = Console(soft_wrap=True, quiet=not is_first, markup=False, highlight=False)
    is_done = options.resume and folder.status() == "done"
    if is_done and len(folder.read(METRICS)) == config.epochs:
        console.print(f"{folder.path} is already finished.")
        return
    if config.device != "cuda" and config.precision == "bf16-mixed":
        # oneDNN's AMX kernels die on some CPUs; without them bfloat16 runs everywhere.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    # Only now: these take seconds to import, and a wrong flag should not.
    from selectconv.lab.data.registry import check_present
    from selectconv.lab.train.estimate import announce

    if options.dry_run:
        announce(config, folder.path, console)
        return
    if not is_first:
        carry_out(config, folder, console, options)
        return
    check_free(folder.path)  # before all else: a run that is under way is not empty either
    check_start(folder, options)
    check_present(config.data, config.data_root)  # before the estimate, which takes a while
    announce(config, folder.path, console)  # builds the network: what is wrong with it shows here
    with locked(folder.path):
        check_start(folder, options)  # it may have been started in the meantime
        if options.overwrite:
            folder.clear()
        last = carry_out(config, folder, console, options)
    result = f"train loss {last['train_loss']:.4f}, no test images"
    verbs = {"compress": "the network without its closed slots", "export": "an ONNX file"}
    if last["test_error"] is not None:
        result = f"test error {last['test_error']:.2f} %"
        verbs |= {"eval": "test its weights again", "report": "tables and figures of the run"}
    console.print(f"done: {result} at the last epoch; see {folder.path}")
    place = shlex.quote(str(folder.path))
    console.print(
        list_commands(
            "next:", [(f"selectconv {verb} {place}", words) for verb, words in verbs.items()]
        )
    )


def choose_run(
    given: dict[str, Any], out: str | None, *, resume: bool
) -> tuple[TrainConfig, RunFolder]:
    """Find the run's settings and its folder: those given or, to resume, those of the folder.

    Raises:
        UsageError: there is no such run, or what was given differs from its settings.
    """
    place = Path("runs") / resolve(given).run_name if out is None else out
    folder = RunFolder(check_folder(place))
    if not resume or (folder.path.is_dir() and folder.is_empty()):  # killed before it began
        return resolve(given), folder
    try:
        config = resolve(folder.read_config())
    except (RunError, TypeError, ValueError) as error:
        raise UsageError(f"--resume {folder.path}: {error}") from error
    recorded = config.to_dict()
    for name, value in given.items():
        check_choice("setting", name, recorded)
        if value != recorded[name]:
            raise UsageError(
                f"--resume: the run in {folder.path} has {name} {recorded[name]!r}, got {value!r}: "
                "leave the flag out, or start another run."
            )
    return config, folder


def check_start(folder: RunFolder, options: Namespace) -> None:
    """Refuse to start in a folder that is not empty, unless it may be overwritten.

    Raises:
        UsageError: it is not empty, or holds something that no run wrote.
    """
    if options.resume or folder.is_empty():
        return
    if not options.overwrite:
        raise UsageError(
            f"{folder.path} is not empty: choose another --out, or --resume the run in it, "
            "or --overwrite it."
        )
    folder.check_own()


def carry_out(
    config: TrainConfig, folder: RunFolder, console: Console, options: Namespace
) -> dict[str, Any]:
    """Start the folder and train; if that fails, the folder says how it ended."""
    from selectconv.lab.cli.display import RunDisplay
    from selectconv.lab.train.loop import train

    display, resume = RunDisplay(config, console), options.resume
    # Settings that lie in a run's folder are that run's.
    repeats = [
        RunFolder(file.parent)
        for file in map(Path, options.config)
        if file.name == CONFIG and file.with_name(MANIFEST).exists()
    ]
    try:
        if is_first_process() and not folder.check(CHECKPOINT).exists():
            if resume:
                print(f"{folder.path} has no checkpoint yet: starting at epoch 0.", file=sys.stderr)
            folder.start(config.to_dict())
        fabric = signals.launch(config)
        with display.bar:
            return train(config, fabric, folder, display, resume=resume, repeats=repeats)
    except BaseException as error:
        is_new = not resume and not (folder / CHECKPOINT).exists()
        signals.ignore()  # the process ends now; one on top must not cut off the line that says why
        with suppress(OSError, SelectConvError):  # the failure itself is reported anyway
            if isinstance(error, KeyboardInterrupt):
                folder.set_status("interrupted")
            elif isinstance(error, DataError | UsageError) and is_new:
                folder.clear()  # nothing was trained: the next try finds an empty folder
            elif not isinstance(error, UsageError):  # a run that was not resumed stays as it was
                folder.set_status("failed", " ".join(str(error).split()))
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(
                f"interrupted; continue with --resume --out {folder.path}."
            ) from None
        raise
