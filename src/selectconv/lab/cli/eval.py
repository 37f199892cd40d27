"""`selectconv eval`: error and loss of a run's weights on the test set."""

import json
from argparse import Namespace

from selectconv.errors import UsageError
from selectconv.lab.cli import signals
from selectconv.lab.cli.parser import BEST, DIR, JSON, Argument, switch

EXAMPLES = [
    ("selectconv eval runs/first", "error and loss on the test images"),
    ("selectconv eval runs/first --holdout", "the same on all images that were not trained on"),
]
ARGUMENTS = [
    DIR,
    BEST,
    switch("--holdout", "test on every image that was not trained on"),
    Argument("--data-root", "folder of the data set", {"metavar": "DIR"}),
    JSON,
]


def run(options: Namespace) -> None:
    """Evaluate."""
    from selectconv.lab.data.registry import describe_lack, load_dataset
    from selectconv.lab.train.device import settings_for_testing
    from selectconv.lab.train.loop import Display, evaluate, load_part
    from selectconv.lab.train.network import check_same_data, check_same_images, load_run
    from selectconv.lab.train.run_folder import RunFolder, is_first_process

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
    if options.holdout:  # what was not trained on: by the images that were
        data = {"name": config.data, "sha256": splits.digest}
        check_same_data(RunFolder(options.dir), data)
    # It depends on the number of images that a part was drawn from, too.
    names = ("num_train", "shape") if options.holdout and config.subset else ("shape",)
    check_same_images(trained.info, splits.info, *names, remedy="pass --data-root")
    fabric = signals.launch(config)
    parts = splits.holdout if options.holdout else (splits.test,)
    loaders = [load_part(part, splits.info, config, fabric) for part in parts]
    result = evaluate(fabric.setup_module(trained.model), loaders, fabric, Display())
    if not options.holdout:
        result = {"test_loss": result["loss"], "test_error": result["error"]}
    if is_first_process():
        words = [
            f"{name.replace('_', ' ')} {value:.6g}{' %' if 'error' in name else ''}"
            for name, value in result.items()
        ]
        row = json.dumps({"weights": trained.weights.name, **result})
        print(row if options.json else f"{trained.weights}: {', '.join(words)}")
