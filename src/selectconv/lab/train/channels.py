"""The methods at work: what happens to the channels of a run's network while it trains.

`train/methods.py` has one row per method, which names the function that builds it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.report import AllocationReport
from selectconv.core.models import count_slots
from selectconv.core.plan import AllocationPlan
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.slimming import Slimmer
from selectconv.lab.zoo.learned_group_conv import Condenser

_CHANGE_NOTHING = partial(AllocationReport, plan=AllocationPlan())


def do_nothing(*arguments: object) -> None:
    """Stand for a part that a method does not have."""


@dataclass
class ChannelMethod:
    """What a method does to the channels of a network; by default nothing.

    Attributes:
        step: acts on the channels after an epoch (0-based); the report is false if nothing changed.
        regularize: adds the gradient of a penalty, after `backward` and before the step.
        counts: counts the channels that are `moved` and `closed`, for a line of metrics.
        state_dict: returns what resuming needs beyond the model; None: nothing.
        load_state_dict: continues from what `state_dict` returned.
    """

    step: Callable[[int], AllocationReport] = _CHANGE_NOTHING
    regularize: Callable[[], None] = do_nothing
    counts: Callable[[nn.Module], dict[str, int]] = count_slots
    state_dict: Callable[[], dict[str, Any] | None] = do_nothing
    load_state_dict: Callable[[Any], None] = do_nothing


def plain(
    config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
) -> ChannelMethod:
    """Leave the channels alone."""
    return ChannelMethod()


def selective(
    config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
) -> ChannelMethod:
    """De- and re-allocate the slots of selective convs: the paper's method and its ablations."""
    allocator = ChannelAllocator(
        model,
        optimizer,
        total_epochs=config.epochs,
        gamma=config.gamma,
        top_k=config.top_k,
        max_copies=config.max_copies,
        stop_at=config.stop_at,
        grace=config.grace,
        shifts=config.shifts,
        mode=config.method,
        damage=config.damage,
        seed=config.seed,
        target_macs=config.target_macs,
        target_params=config.target_params,
        granularity=config.granularity,
        example_input=torch.zeros(1, *info.shape, device=next(model.parameters()).device),
    )
    return ChannelMethod(
        step=allocator.step,
        state_dict=allocator.state_dict,
        load_state_dict=allocator.load_state_dict,
    )


def learned_groups(
    config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
) -> ChannelMethod:
    """Condense CondenseNet's learned group convolutions; an input that a group drops is closed."""
    condenser = Condenser(model, total_epochs=config.epochs, group_lasso=config.group_lasso)
    return ChannelMethod(
        condenser.step,
        condenser.regularize,
        lambda _: {"moved": 0, "closed": condenser.num_dropped()},
    )


def slimming(
    config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
) -> ChannelMethod:
    """Slim a plain network of the zoo; a filter that was cut out is closed."""
    slimmer = Slimmer(config, info, model)
    return ChannelMethod(
        slimmer.step, slimmer.regularize, lambda _: {"moved": 0, "closed": slimmer.num_cut()}
    )
