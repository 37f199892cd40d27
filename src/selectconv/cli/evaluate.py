"""`selectconv eval`: error and loss of a run's weights on the test set."""

import json

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from selectconv.errors import RunError, UsageError
from selectconv.train.config import resolve
from selectconv.train.run_folder import BEST, LAST, RunFolder

HELP = "test a run's last (or best) weights"


def build_parser() -> ArgumentParser:
    """Build the verb's parser."""
    parser = ArgumentParser(description=HELP, exit_on_error=False)
    parser.add_argument("dir", type=str, help="folder of the run")
    parser.add_argument("--best", action="store_true", help="the epoch of the lowest test error")
    parser.add_argument(
        "--holdout", action="store_true", help="test on every image that was not trained on"
    )
    parser.add_argument(
        "--data-root", type=str | None, default=None, help="where the data set lies"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    return parser


def run(options: Namespace) -> int:
    """Evaluate."""
    folder = RunFolder(options.dir)
    try:
        config = resolve(folder.read_config())
    except RunError as error:
        raise UsageError(str(error)) from error
    name = BEST if options.best else LAST

    from selectconv.cli.display import Lines
    from selectconv.data.registry import load_dataset
    from selectconv.train.checkpoint import load_weights
    from selectconv.train.loop import Training, build_fabric

    root = options.data_root or config.data_root
    splits = load_dataset(
        config.data,
        root,
        subset=config.subset,
        test_subset=config.test_subset,
        image_size=config.image_size,
        holdout=options.holdout,
    )
    training = Training(config, build_fabric(config), splits)
    load_weights(folder / name, training.model, slimmed=config.method_info.cuts)
    display = Lines(config, Console())
    if options.holdout:
        result = training.evaluate_holdout(display)
        words = (
            f"error {result['error']:.2f} %, loss {result['loss']:.4f} on the {result['images']:,} "
            "images that were not trained on"
        )
    else:
        loss, wrong = training.evaluate(display, 0)
        result = {"test_loss": loss, "test_error": wrong}
        words = f"test error {wrong:.2f} %, test loss {loss:.4f}"
    if training.fabric.global_rank == 0:
        print(
            json.dumps({"weights": name, **result}) if options.json else f"{folder / name}: {words}"
        )
    return 0
