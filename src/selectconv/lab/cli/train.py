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

from selectconv.errors import DataError, RunError, SelectConvError, UsageError
from selectconv.lab.cli import signals
from selectconv.lab.cli.output import check_folder
from selectconv.lab.cli.parser import Parser, list_commands
from selectconv.lab.train.config import (
    TrainConfig,
    check_names,
    describe_setting,
    resolve,
    setting_names,
    setting_types,
)
from selectconv.lab.train.folder_lock import check_free, locked
from selectconv.lab.train.manifest import CHECKPOINT
from selectconv.lab.train.run_folder import CONFIG, RunFolder, is_first_process

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


def add_arguments(parser: Parser) -> None:
    """Add one flag per setting, those that people change first on top, and the command's own."""
    _add_settings(parser, "what people change first", _FIRST)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file with any of these settings; flags override it",
    )
    run.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/NAME)")
    for flag, words in {
        "--resume": "continue the run in --out",
        "--overwrite": "delete the run in --out, and start again",
        "--dry-run": "print the plan of the run, and stop",
    }.items():
        run.add_argument(flag, action="store_true", help=words)
    for group, title in _TITLES.items():
        names = [name for name in setting_names(group) if name not in _FIRST]
        _add_settings(parser, title, names)


def _add_settings(parser: Parser, title: str, names: Iterable[str]) -> None:
    section, types = parser.add_argument_group(title), setting_types()
    for name in names:
        more: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
        if types[name] is bool:
            more = {"metavar": "true|false", "nargs": "?", "const": True}
        section.add_argument(
            "--" + name.replace("_", "-"),
            type=str if types[name] is str else _read_value,
            help=describe_setting(name).replace("%", "%%"),
            **more,
        )


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number: PyYAML follows YAML 1.1, which asks for 1.0e-3."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_value(text: str) -> Any:
    """Read a flag as YAML; what is none, the check of the setting refuses."""
    try:
        return yaml.load(text, _Loader) if text else text
    except yaml.YAMLError:
        return text


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
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--config: {path} cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        content = str(error)
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
    console = Console(soft_wrap=True, quiet=not is_first_process(), markup=False, highlight=False)
    if options.resume and folder.is_finished(config.epochs):
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
    if not is_first_process():  # rank 0 looks after the folder
        carry_out(config, folder, console, resume=options.resume)
        return
    check_free(folder.path)  # before all else: a run that is under way is not empty either
    check_start(folder, options)
    check_present(config.data, config.data_root)  # before the estimate, which takes a while
    announce(config, folder.path, console)  # builds the network: what is wrong with it shows here
    with locked(folder.path):
        check_start(folder, options)  # it may have been started in the meantime
        if options.overwrite:
            folder.clear()
        last = carry_out(config, folder, console, resume=options.resume)
    is_tested = last["test_error"] is not None
    result = f"train loss {last['train_loss']:.4f}, no test images"
    if is_tested:
        result = f"test error {last['test_error']:.2f} %"
    console.print(f"done: {result} at the last epoch; see {folder.path}")
    if console.is_terminal:
        console.print(next_commands(folder.path, is_tested=is_tested))


def next_commands(run: Path, *, is_tested: bool) -> str:
    """Return what can be done with a finished run; `eval` and `report` need test images."""
    place = shlex.quote(str(run))
    tests = [
        (f"selectconv eval {place}", "test its weights again"),
        (f"selectconv report {place}", "tables and figures of the run"),
    ]
    others = [
        (f"selectconv compress {place}", "a smaller network with the same outputs"),
        (f"selectconv export {place}", "an ONNX file"),
    ]
    return list_commands("next:", [*tests, *others] if is_tested else others)


def choose_run(
    given: dict[str, Any], out: str | None, *, resume: bool
) -> tuple[TrainConfig, RunFolder]:
    """Find the run's settings and its folder: those given or, to resume, those of the folder.

    Raises:
        UsageError: there is no such run, or what was given differs from its settings.
    """
    if out is None or not resume:
        config = resolve(given)
        out = str(Path("runs") / config.run_name) if out is None else out
    folder = RunFolder(check_folder(out))
    if not resume:
        return config, folder
    if not folder.path.is_dir():
        raise UsageError(f"--resume: there is no folder {folder.path}.")
    if folder.is_empty():  # killed before it wrote anything
        return resolve(given), folder
    if not (folder / CONFIG).exists():
        raise UsageError(f"--resume: {folder.path} is not a run: it has no {CONFIG}.")
    try:
        config = resolve(folder.read_config())
    except (RunError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from error
    check_names(given)
    for name, value in given.items():
        recorded = config.to_dict()[name]
        if recorded != value:
            raise UsageError(
                f"--resume: the run in {folder.path} has {name} {recorded!r}, got {value!r}: leave "
                "the flag out, or start another run."
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
    config: TrainConfig, folder: RunFolder, console: Console, *, resume: bool
) -> dict[str, Any]:
    """Start the folder and train; if that fails, the folder says how it ended."""
    from selectconv.lab.cli.display import RunDisplay
    from selectconv.lab.train.loop import train

    display = RunDisplay(config, console)
    try:
        if not folder.has_checkpoint():
            if resume and is_first_process():
                words = "has no checkpoint yet: starting at epoch 0."
                print(f"{folder.path} {words}", file=sys.stderr)
            folder.start(config.to_dict())
        return train(config, folder, display, resume=resume)
    except BaseException as error:
        signals.ignore()  # the process ends now; one on top must not cut off the line that says why
        with suppress(OSError, SelectConvError):  # the failure itself is reported anyway
            _record_end(folder, error, resume=resume)
        if isinstance(error, KeyboardInterrupt):
            words = f"interrupted; continue with --resume --out {folder.path}."
            raise KeyboardInterrupt(words) from None
        raise
    finally:
        display.close()


def _record_end(folder: RunFolder, error: BaseException, *, resume: bool) -> None:
    """Write down how a training failed."""
    if isinstance(error, DataError) and not resume and not (folder / CHECKPOINT).exists():
        folder.clear()  # nothing was trained: the next try finds an empty folder
    elif isinstance(error, KeyboardInterrupt):
        folder.set_status("interrupted")
    else:
        folder.set_status("failed", " ".join(str(error).split()))
