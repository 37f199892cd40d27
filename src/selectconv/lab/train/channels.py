"""The methods at work: what happens to the channels of a run's network while it trains.

`train/methods.py` has one row per method; `train/slimming.py` has another class.
"""

from collections.abc import Iterable
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
from selectconv.lab.zoo.learned_group_conv import Condenser, condense, learned_group_convs


class Plain:
    """What a method does to the channels of a network; this one leaves them alone.

    The other methods replace what they do differently.

    Args:
        config: the run's settings.
        info: its data set.
        model: its network, which is on its device.
        optimizer: of the network's parameters.
    """

    def __init__(
        self, config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self.model = model

    def regularize(self) -> None:
        """Add the gradient of the method's penalty, after `backward` and before the step."""

    def step(self, epoch: int) -> AllocationReport:
        """Act on the channels after an epoch (0-based); the report is false if nothing changed."""
        return AllocationReport(epoch, AllocationPlan())

    def counts(self) -> dict[str, int]:
        """Count the channels that are `moved` and `closed`, for a line of metrics."""
        return {"moved": 0, "closed": 0}

    def state_dict(self) -> dict[str, Any] | None:
        """Return what resuming needs beyond the model; None: nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned."""

    @staticmethod
    def apply_log(model: nn.Module, log: Iterable[AllocationReport]) -> None:
        """Bring a fresh network into the form that the lines of `allocation.jsonl` lead to.

        Nothing to do where a log does not change the form: it is replayed slot by slot.
        """

    @staticmethod
    def finish(model: nn.Module) -> nn.Module:
        """Return a trained network as it is deployed."""
        return model


class Selective(Plain):
    """De- and re-allocate the slots of selective convs: the paper's method and its ablations."""

    def __init__(
        self, config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self.allocator = ChannelAllocator(
            model,
            optimizer,
            total_epochs=config.epochs,
            gamma=config.gamma,
            top_k=config.top_k,
            max_copies=config.max_copies,
            stop_at=config.stop_at,
            grace=config.grace,
            mode=config.method,
            damage=config.damage,
            seed=config.seed,
            target_macs=config.target_macs,
            target_params=config.target_params,
            example_input=torch.zeros(1, *info.shape, device=next(model.parameters()).device),
        )

    def step(self, epoch: int) -> AllocationReport:
        """De- and re-allocate."""
        return self.allocator.step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the allocator's state."""
        return self.allocator.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the allocator's state."""
        self.allocator.load_state_dict(state)

    def counts(self) -> dict[str, int]:
        """Count the open slots that were moved and the closed slots."""
        return count_slots(self.allocator.model)._asdict()


class LearnedGroups(Plain):
    """Condense CondenseNet's learned group convolutions (`lgc`)."""

    def __init__(
        self, config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self.condenser = Condenser(
            model, total_epochs=config.epochs, group_lasso=config.group_lasso
        )

    def regularize(self) -> None:
        """Add the gradient of the group lasso."""
        self.condenser.regularize()

    def step(self, epoch: int) -> AllocationReport:
        """Drop the inputs of the stage that is due."""
        return self.condenser.step(epoch)

    def counts(self) -> dict[str, int]:
        """Count the pairs of a group of filters and an input that it no longer reads."""
        return {"moved": 0, "closed": self.condenser.num_dropped()}

    @staticmethod
    def apply_log(model: nn.Module, log: Iterable[AllocationReport]) -> None:
        """Drop what the log says, and leave the rest as group convs.

        Raises:
            ValueError: the log does not fit the network.
        """
        layers = learned_group_convs(model)
        for report in log:
            for name, plan in report.plan:
                dropped = plan.closed.tolist()
                if name not in layers or max(dropped, default=0) >= layers[name].reads.numel():
                    raise ValueError(f"its log does not fit the network at {name!r}.")
                layers[name].reads.view(-1)[dropped] = False
        condense(model)

    @staticmethod
    def finish(model: nn.Module) -> nn.Module:
        """Write the learned groups as what they have become: group convs."""
        return condense(model)
