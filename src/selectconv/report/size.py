"""Parameters and multiply-adds of a run's network at its end, from its log."""

import torch

from selectconv.cost import Cost, count
from selectconv.data.registry import dataset_info
from selectconv.layer import SelectConvNd
from selectconv.report.collect import Run
from selectconv.report.replay import CLOSED, replay
from selectconv.train.loop import build_model


def measure_size(run: Run) -> Cost | None:
    """Count a run's network for one image, without closed slots and what only they read.

    Shift biases do not count, as in the paper: a re-allocated slot costs what any slot does. None
    for methods that shrink a network in another way: its log does not tell its size.
    """
    if run.config.method != "plain" and not run.config.is_selective:
        return None
    info = dataset_info(run.config.data, run.config.image_size)
    model = build_model(run.config, info)
    for history in replay(run):
        layer = model.get_submodule(history.name)
        assert isinstance(layer, SelectConvNd)
        layer.close([slot for slot, state in enumerate(history.states[-1]) if state == CLOSED])
    return count(model, torch.zeros(1, *info.shape))
