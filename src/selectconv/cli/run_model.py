"""The network of a run, for the verbs that make something of it."""

from pathlib import Path
from typing import Any

from selectconv.errors import RunError, UsageError
from selectconv.train.config import resolve
from selectconv.train.run_folder import BEST, LAST, RunFolder


def load_run(path: str | Path, *, best: bool) -> tuple[Any, Any, tuple[int, int, int]]:
    """Load a run's network with its last or best weights; no data is needed.

    Returns:
        The network, in evaluation mode; the plain network of the same kind, for comparison, with
        weights of its own; and the shape (C, H, W) of an image.

    Raises:
        UsageError: the folder is not a run, or has no weights.
    """
    folder = RunFolder(path)
    try:
        config = resolve(folder.read_config())
    except RunError as error:
        raise UsageError(str(error)) from error
    weights = folder / (BEST if best else LAST)
    if not weights.exists():
        raise UsageError(f"there is no {weights}: the run has not finished an epoch yet.")

    from selectconv.data.registry import dataset_info
    from selectconv.train.checkpoint import load_weights
    from selectconv.train.network import build_model, build_plain

    info = dataset_info(config.data, config.image_size)
    model = build_model(config, info)
    load_weights(weights, model, slimmed=config.method_info.cuts)
    model = config.method_info.implementation().finish(model)
    return model.eval(), build_plain(config, info).eval(), info.shape
