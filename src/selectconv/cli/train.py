"""`selectconv train`: one run, from its settings to its folder."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from selectconv.errors import RunError, SelectConvError, UsageError
from selectconv.train.config import TrainConfig, resolve, setting_names
from selectconv.train.methods import METHODS
from selectconv.train.run_folder import CHECKPOINT, CONFIG, RunFolder

HELP = "train a network, plain or selective, as in the paper"

_WHOLE, _NUMBER = "a whole number", "a number"
_SETTINGS: dict[str, tuple[Any, str, str]] = {
    "model": (
        str,
        "a model",
        "a network of `selectconv models`, timm:NAME, or package.module:function, which is called "
        "with num_classes and in_channels (default: densenet40)",
    ),
    "model_options": (
        dict[str, Any],
        "a mapping such as {growth_rate: 8}",
        "options of the network, such as '{growth_rate: 8, units: [3, 3, 3]}'",
    ),
    "data": (str, "a data set", "data set; `selectconv data list` lists them (default: cifar10)"),
    "data_root": (str, "a folder", "where the data set lies; nothing else is searched"),
    "method": (str, "a method", f"one of {', '.join(METHODS)} (default: select)"),
    "epochs": (int, _WHOLE, "passes over the training set (default: the paper's)"),
    "batch_size": (int, _WHOLE, "images a step, over all processes (default: the paper's)"),
    "lr": (float, _NUMBER, "learning rate at the start of the cosine (default: 0.1)"),
    "momentum": (float, _NUMBER, "Nesterov momentum (default: 0.9)"),
    "weight_decay": (float, _NUMBER, "weight decay of all but the shifts (default: 1e-4)"),
    "shift_weight_decay": (float, _NUMBER, "weight decay of the shifts (default: 1e-5)"),
    "gamma": (float, _NUMBER, "damage level of de-allocation (default: the paper's)"),
    "top_k": (int, _WHOLE, "K, candidates of re-allocation (default: 3)"),
    "max_copies": (int | str, "a whole number or none", "N_max, or none (default: the paper's)"),
    "stop_at": (float, _NUMBER, "part of the training that selects channels (default: 0.5)"),
    "grace": (int, _WHOLE, "epochs before a re-opened slot may be closed again (default: 0)"),
    "damage": (str, "a damage", "auto, mean (the paper) or rms (default: auto)"),
    "target_macs": (float, _NUMBER, "end at this part of the dense network's multiply-adds"),
    "target_params": (float, _NUMBER, "end at this part of the dense network's parameters"),
    "group_lasso": (float, _NUMBER, "lgc: strength of the group lasso (default: 0)"),
    "bn_sparsity": (float, _NUMBER, "slimming: L1 penalty on BN's scales (default: 1e-5)"),
    "seed": (int, _WHOLE, "seed of everything random (default: 0)"),
    "subset": (int, _WHOLE, "train on so many images only"),
    "test_subset": (int, _WHOLE, "test on so many images only"),
    "image_size": (int, _WHOLE, "shrink the images to this height and width"),
    "holdout": (
        bool,
        "true or false",
        "end with a test on every image that was not trained on: holdout.json (default: false)",
    ),
    "device": (str, "a device", "auto, cpu, cuda or mps (default: auto)"),
    "precision": (str, "a precision", "32-true, bf16-mixed or 16-mixed (default: 32-true)"),
    "compile": (bool, "true or false", "run the network through torch.compile (default: false)"),
    "channels_last": (bool, "true or false", "channels-last memory order (default: true)"),
}
KINDS = {name: kind for name, (_, kind, _) in _SETTINGS.items()}


def build_parser() -> ArgumentParser:
    """Build the verb's parser: a flag for every setting, with no default of its own."""
    parser = ArgumentParser(description=HELP, exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the settings below"
    )
    for name in setting_names():
        kind, _, text = _SETTINGS[name]
        more: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind | None, default=None, help=text, **more)
    parser.add_argument("--out", type=str | None, default=None, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    return parser


def run(options: Namespace) -> int:
    """Train."""
    given = {name: options[name] for name in setting_names() if options[name] is not None}
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite exclude each other: go on, or start anew.")
    config, folder = choose_run(given, options.out, resume=options.resume)
    is_first = int(os.environ.get("RANK", "0")) == 0
    if options.resume and folder.status() == "done":
        if is_first:
            print(f"{folder.path} is finished already.")
        return 0
    if config.device != "cuda" and config.precision == "bf16-mixed":
        # oneDNN's AMX kernels die on some CPUs; without them bfloat16 runs everywhere.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    # Only now: these take seconds to import, and a wrong flag should not.
    from selectconv.cli.display import choose_display
    from selectconv.train.estimate import announce
    from selectconv.train.loop import train

    console = Console(soft_wrap=True, quiet=not is_first)
    if options.dry_run:
        announce(config, folder.path, console)
        return 0
    if is_first and not options.resume and not folder.is_empty():
        if not options.overwrite:
            raise UsageError(
                f"{folder.path} is not empty: choose another --out, or --resume the run in it, "
                "or --overwrite it."
            )
        folder.clear()
    if is_first:
        announce(config, folder.path, console)
        if not (folder / CHECKPOINT).exists():
            folder.start(config.to_dict())
    try:
        with stoppable():
            last = train(config, folder, choose_display(config, console), resume=options.resume)
    except Exception as error:
        if is_first:
            message = " ".join(str(error).split())
            _try(lambda: folder.set_status("failed", message))
        raise
    console.print(
        f"done: test error {last['test_error']:.2f} % at the last epoch; {folder.path} has it all",
        highlight=False,
    )
    return 0


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM, which torchrun sends when another process has died, into an error."""
    why = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        why = ", which torchrun sends when another process of the run has died"

    def stop(number: int, frame: object) -> None:
        raise RunError(f"stopped by SIGTERM{why}: go on with --resume.")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        # The process ends now; a signal on top must not cut off the line that says why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def choose_run(
    given: dict[str, Any], out: str | None, *, resume: bool
) -> tuple[TrainConfig, RunFolder]:
    """Find the run's settings and its folder: from what was given or, to resume, from the folder.

    Raises:
        UsageError: there is no such run, or what was given differs from its settings.
    """
    if out is None or not resume:
        config = resolve(given)
        folder = RunFolder(out or Path("runs") / config.run_name)
        if not resume:
            return config, folder
    else:
        folder = RunFolder(out)
    if not folder.path.is_dir():
        raise UsageError(f"--resume: there is no folder {folder.path}.")
    if folder.is_empty():  # killed before it wrote anything
        return resolve(given), folder
    if not (folder / CONFIG).exists():
        raise UsageError(f"--resume: {folder.path} is not a run: it has no {CONFIG}.")
    saved = folder.read_config()
    try:
        config = resolve(saved)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from error
    different = [name for name, value in given.items() if config.to_dict()[name] != value]
    if different:
        name = different[0]
        raise UsageError(
            f"--resume: the run in {folder.path} has {name} {config.to_dict()[name]!r}, "
            f"got {given[name]!r}: leave the flag out, or start another run."
        )
    return config, folder


def _try(action: Any) -> None:
    """Note a failure in the folder if that is possible; the failure itself is reported anyway."""
    try:
        action()
    except (OSError, SelectConvError):
        return
