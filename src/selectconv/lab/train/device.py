"""The device of a run: the one that its settings name, or the best one of this machine."""

from dataclasses import replace

import torch

from selectconv.errors import UsageError
from selectconv.lab.train.config import PRECISIONS, TrainConfig


def choose_device(config: TrainConfig) -> torch.device:
    """Return the device that a run with these settings takes.

    Raises:
        UsageError: this machine does not have it, or it does not compute in this precision.
    """
    here = [
        name
        for name, is_here in (
            ("cuda", torch.cuda.is_available()),
            ("mps", torch.backends.mps.is_available()),
            ("cpu", True),
        )
        if is_here
    ]
    name = here[0] if config.device == "auto" else config.device
    if name not in here:
        raise UsageError(
            f"`device` {name!r} is not on this machine; accepted here are auto, {', '.join(here)}."
        )
    if name == "cpu" and config.precision == "16-mixed":
        able = " and ".join(word for word in PRECISIONS if word != config.precision)
        raise UsageError(
            f"`precision` {config.precision!r} needs a GPU; accepted on a CPU are {able}."
        )
    return torch.device(name)


def settings_for_testing(config: TrainConfig) -> TrainConfig:
    """Return the settings with which this machine can test what another one has trained."""
    try:
        choose_device(config)
    except UsageError:
        return replace(config, device="auto", precision="32-true")
    return config
