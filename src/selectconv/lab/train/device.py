"""The device, precision and processes of a run."""

import os
from dataclasses import replace

import torch
from lightning_fabric import Fabric

from selectconv.errors import UsageError
from selectconv.lab.train.config import TrainConfig


def choose_device(config: TrainConfig) -> torch.device:
    """Return the device that a run with these settings takes.

    Raises:
        UsageError: this machine does not have it, or it does not compute in this precision.
    """
    gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    here = [*(name for name in gpus if gpus[name]), "cpu"]
    name = here[0] if config.device == "auto" else config.device
    if name not in here:
        raise UsageError(
            f"`device` {name!r} is not on this machine; accepted here are auto, {', '.join(here)}."
        )
    if name == "cpu" and config.precision == "16-mixed":
        raise UsageError(
            "`precision` '16-mixed' needs a GPU; accepted on a CPU are 32-true and bf16-mixed."
        )
    return torch.device(name)


def settings_for_testing(config: TrainConfig) -> TrainConfig:
    """Return the settings with which this machine can test what another one has trained."""
    try:
        choose_device(config)
    except UsageError:
        return replace(config, device="auto", precision="32-true")
    return config


def build_fabric(config: TrainConfig) -> Fabric:
    """Set up devices, precision and processes; under torchrun, all of its processes.

    Raises:
        UsageError: this machine has no such device, or not in this precision, or the batch cannot
            be divided by the number of processes.
    """
    choose_device(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.batch_size % world:
        raise UsageError(
            f"`batch_size` {config.batch_size} must be a multiple of {world}, the number of "
            "processes: each takes an equal part of every batch."
        )
    fabric = Fabric(
        accelerator=config.device,
        devices=local,
        num_nodes=world // local,
        strategy="ddp" if world > 1 else "auto",
        precision=config.precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    return fabric
