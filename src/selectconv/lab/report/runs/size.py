"""Parameters and multiply-adds of a run's network at its end."""

from dataclasses import replace
from functools import cache

import torch

from selectconv.core.layer import SelectConvNd
from selectconv.deploy.cost import Cost, count
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.report.runs.replay import CLOSED, replay
from selectconv.lab.train.checkpoint import load_weights
from selectconv.lab.train.network import build_model
from selectconv.lab.train.run_data import run_data


@cache
def measure_size(run: Run) -> Cost | None:
    """Count a run's network for one image, without closed slots and what only they read.

    Shift biases do not count, as in the paper: a re-allocated slot costs what any slot does. It is
    known from the run's log; of a slimmed network from its weights alone: None where they were not
    kept.

    Raises:
        ValueError: the log does not fit the network.
        RunError: the weights do not.
    """
    info = run_data(run.path, run.config)
    # Wherever it selects, a slot costs the same.
    options = {k: v for k, v in run.config.model_options.items() if k != "placement"}
    model = build_model(replace(run.config, model_options=options), info)
    method = run.config.method_info
    if method.cuts:
        if run.weights is None:
            return None
        load_weights(run.weights, model, slimmed=True)
    else:
        method.implementation().apply_log(model, run.allocation)
    for history in replay(run):
        layer = model.get_submodule(history.name)
        assert isinstance(layer, SelectConvNd)
        layer.close([slot for slot, state in enumerate(history.states[-1]) if state == CLOSED])
    return count(model, torch.zeros(1, *info.shape))
