"""`selectconv eval`: error and loss of a run's weights on the test set."""

import json

from jsonargparse import Namespace
from rich.console import Console

from selectconv.errors import UsageError
from selectconv.lab.cli.parser import Parser
from selectconv.lab.cli.signals import work_begins


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("dir", type=str, help="folder of the run")
    parser.add_argument(
        "--best", action="store_true", help="use the weights with the lowest test error"
    )
    parser.add_argument(
        "--holdout", action="store_true", help="test on every image that was not trained on"
    )
    parser.add_argument("--data-root", type=str | None, default=None, help="folder of the data set")
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def run(options: Namespace) -> int:
    """Evaluate."""
    from selectconv.lab.cli.display import Lines
    from selectconv.lab.data.registry import describe_lack, load_dataset
    from selectconv.lab.train.device import settings_for_testing
    from selectconv.lab.train.evaluation import Evaluation
    from selectconv.lab.train.loop import build_fabric
    from selectconv.lab.train.network import load_run
    from selectconv.lab.train.run_data import check_same_images

    work_begins()
    trained = load_run(options.dir, best=options.best)
    config = settings_for_testing(trained.config)
    splits = load_dataset(
        config.data,
        options.data_root or config.data_root,
        subset=config.subset,
        test_subset=config.test_subset,
        image_size=trained.info.shape[1] if trained.info.classes else config.image_size,
        holdout=options.holdout,
    )
    if splits.test is None:
        raise UsageError(f"`eval` needs test images: {describe_lack(splits.info)}")
    # What was not trained on depends on the number of images that a part was drawn from.
    names = ("num_train", "shape") if options.holdout and config.subset else ("shape",)
    check_same_images(trained.info, splits.info, *names, remedy="pass --data-root")
    evaluation = Evaluation(config, build_fabric(config), splits)
    evaluation.wrapped = evaluation.fabric.setup_module(trained.model)
    display = Lines(config, Console())
    if options.holdout:
        result = evaluation.evaluate_holdout(display)
        words = (
            f"error {result['error']:.2f} %, loss {result['loss']:.4f} on the {result['images']:,} "
            "images that were not trained on"
        )
    else:
        loss, wrong = evaluation.evaluate(display, 0)
        result = {"test_loss": loss, "test_error": wrong}
        words = f"test error {wrong:.2f} %, test loss {loss:.4f}"
    if evaluation.fabric.global_rank == 0:
        weights = trained.weights
        row = {"weights": weights.name, **result}
        print(json.dumps(row) if options.json else f"{weights}: {words}")
    return 0
