"""`selectconv train`: one run, from its settings to its folder."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, get_loader
from rich.console import Console

from selectconv.errors import DataError, RunError, SelectConvError, UsageError
from selectconv.lab.cli.examples import next_commands
from selectconv.lab.cli.parser import Parser
from selectconv.lab.cli.places import check_folder
from selectconv.lab.cli.signals import work_begins
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

# What the parser looks at: texts are taken as they are, everything else is read as YAML.
_ACCEPTED: dict[type, Any] = {str: str | None, dict: dict[str, Any] | str | None}

# The titles of `--help`, and what stands under them.
_RUN, _SELECTION = "the run", "how channels are selected"
_SECTIONS = {
    "what people change first": ["model", "data", "method", "epochs", "gamma", "seed"],
    _RUN: ["data_root", "holdout"],
    _SELECTION: ["grace", "stop_at", "top_k", "max_copies", "damage"],
    "to end at a given cost": ["target_macs", "target_params"],
    "the optimizer": ["batch_size", "lr", "momentum", "weight_decay", "shift_weight_decay"],
    "smaller experiments": ["subset", "test_subset", "image_size", "model_options"],
    "the machine": ["device", "precision", "compile", "channels_last"],
    "compression baselines": ["group_lasso", "bn_sparsity"],
}


def add_arguments(parser: Parser) -> None:
    """Add one flag per setting, those that people change first on top, and the command's own."""
    types = setting_types()
    for title, names in sections().items():
        section = parser.add_argument_group(title)
        for name in names:
            kind = types[name]
            more: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
            more["metavar"] = "true|false" if kind is bool else name.rpartition("_")[2].upper()
            flag, accepted = "--" + name.replace("_", "-"), _ACCEPTED.get(kind, Any)
            words = describe_setting(name)
            section.add_argument(flag, type=accepted, default=None, help=words, **more)
        if title == _RUN:
            _add_of_run(section)


def sections() -> dict[str, list[str]]:
    """Return the settings under the titles of the help; a new setting is placed by its group."""
    placed = {name for names in _SECTIONS.values() for name in names}
    new = [name for name in setting_names() if name not in placed]
    selection = setting_names("selection")
    return {
        title: [
            *names,
            *(name for name in new if title == (_SELECTION if name in selection else _RUN)),
        ]
        for title, names in _SECTIONS.items()
    }


def _add_of_run(section: Any) -> None:
    """Add the flags that are not settings of the training."""
    section.add_argument(
        "--config",
        type=str,
        action="append",
        default=[],
        help="YAML file with any of these settings; flags override it",
    )
    section.add_argument(
        "--out", type=str | None, default=None, help="folder of the run (default: runs/NAME)"
    )
    section.add_argument("--resume", action="store_true", help="continue the run in --out")
    section.add_argument(
        "--overwrite", action="store_true", help="delete the run in --out, and start again"
    )
    section.add_argument(
        "--dry-run", action="store_true", help="print the plan of the run, and stop"
    )


def read_settings(options: Namespace) -> dict[str, Any]:
    """Return the settings of the config files and of the flags, which win.

    Raises:
        UsageError: a file cannot be read, or does not hold settings.
    """
    given: dict[str, Any] = {}
    for path in options.config:
        given |= read_file(Path(path))
    given |= {name: options[name] for name in setting_names() if options[name] is not None}
    types = setting_types()
    return {
        # A whole number is a number: 1 is 1.0 where a fraction is meant.
        name: float(value)
        if types.get(name) in (float, float | str) and type(value) is int
        else value
        for name, value in given.items()
    }


def read_file(path: Path) -> dict[str, Any]:
    """Read a config file; null means that a setting is not given."""
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))
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
    return {name: value for name, value in content.items() if value is not None}


def run(options: Namespace) -> int:
    """Train."""
    given = read_settings(options)
    if options.resume and options.overwrite:
        raise UsageError(
            "--resume and --overwrite cannot be combined: continue the run, or start again."
        )
    config, folder = choose_run(given, options.out, resume=options.resume)
    is_first = is_first_process()
    if options.resume and folder.is_finished(config.epochs):
        if is_first:
            print(f"{folder.path} is already finished.")
        return 0
    if config.device != "cuda" and config.precision == "bf16-mixed":
        # oneDNN's AMX kernels die on some CPUs; without them bfloat16 runs everywhere.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    # Only now: these take seconds to import, and a wrong flag should not.
    from selectconv.lab.data.registry import check_present
    from selectconv.lab.train.estimate import announce

    console = Console(soft_wrap=True, quiet=not is_first, markup=False)
    if options.dry_run:
        announce(config, folder.path, console)
        return 0
    if not is_first:  # rank 0 looks after the folder
        carry_out(config, folder, console, resume=options.resume)
        return 0
    check_free(folder.path)  # before all else: a run that is under way is not empty either
    check_start(folder, options)
    check_present(config.data, config.data_root)  # before the estimate, which takes a while
    announce(config, folder.path, console)  # builds the network: what is wrong with it shows here
    with locked(folder.path):
        check_start(folder, options)  # it may have been started in the meantime
        if options.overwrite:
            folder.clear()
        last = carry_out(config, folder, console, resume=options.resume)
    result = f"train loss {last['train_loss']:.4f}, no test images"
    if last["test_error"] is not None:
        result = f"test error {last['test_error']:.2f} %"
    console.print(f"done: {result} at the last epoch; see {folder.path}", highlight=False)
    if console.is_terminal:
        is_tested = last["test_error"] is not None
        words = next_commands(shlex.quote(str(folder.path)), is_tested=is_tested)
        console.print(words, highlight=False)
    return 0


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
    from selectconv.lab.cli.display import choose_display
    from selectconv.lab.train.loop import train

    work_begins()
    display = choose_display(config, console)
    try:
        with stoppable():
            if not folder.has_checkpoint():
                if resume and is_first_process():
                    words = "has no checkpoint yet: starting at epoch 0."
                    print(f"{folder.path} {words}", file=sys.stderr)
                folder.start(config.to_dict())
            return train(config, folder, display, resume=resume)
    except KeyboardInterrupt:
        _try(lambda: folder.set_status("interrupted"))
        raise KeyboardInterrupt(
            f"interrupted; continue with --resume --out {folder.path}."
        ) from None
    except Exception as error:
        message = " ".join(str(error).split())
        if isinstance(error, DataError) and not resume and not (folder / CHECKPOINT).exists():
            _try(folder.clear)  # nothing was trained: the next try finds an empty folder
        else:
            _try(lambda: folder.set_status("failed", message))
        raise
    finally:
        display.close()


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM, which torchrun sends when another process has died, into an error."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    why = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        why = ", which torchrun sends when another process of the run has died"

    def stop(number: int, frame: object) -> None:
        raise RunError(f"stopped by SIGTERM{why}: continue with --resume.")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        # The process ends now; a signal on top must not cut off the line that says why.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def choose_run(
    given: dict[str, Any], out: str | None, *, resume: bool
) -> tuple[TrainConfig, RunFolder]:
    """Find the run's settings and its folder: those given or, to resume, those of the folder.

    Raises:
        UsageError: there is no such run, or what was given differs from its settings.
    """
    if out is None or not resume:
        config = resolve(given)
        default = Path("runs") / config.run_name
        folder = RunFolder(check_folder(default if out is None else out))
        if not resume:
            return config, folder
    else:
        folder = RunFolder(check_folder(out))
    if not folder.path.is_dir():
        raise UsageError(f"--resume: there is no folder {folder.path}.")
    if folder.is_empty():  # killed before it wrote anything
        return resolve(given), folder
    if not (folder / CONFIG).exists():
        raise UsageError(f"--resume: {folder.path} is not a run: it has no {CONFIG}.")
    try:
        config = resolve(folder.read_config())
    except RunError as error:
        raise UsageError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from error
    check_names(given)
    different = [name for name, value in given.items() if config.to_dict()[name] != value]
    if different:
        name = different[0]
        raise UsageError(
            f"--resume: the run in {folder.path} has {name} {config.to_dict()[name]!r}, "
            f"got {given[name]!r}: leave the flag out, or start another run."
        )
    return config, folder


def _try(action: Any) -> None:
    """Record a failure in the folder, if possible; the failure itself is reported anyway."""
    try:
        action()
    except (OSError, SelectConvError):
        return
