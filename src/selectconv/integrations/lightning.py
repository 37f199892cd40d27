"""Channel selectivity in a Lightning `Trainer`: one callback."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.report import AllocationReport
from selectconv.allocate.settings import Settings
from selectconv.core.models import count_slots
from selectconv.errors import AllocationError
from selectconv.extras import needing

with needing("lightning", "selectconv.integrations.lightning", "selectconv[lightning]"):
    from lightning.pytorch import Callback, LightningModule, Trainer

_OTHERS = ("seed", "example_input")  # options that are not settings


class ChannelAllocation(Callback):
    """De- and re-allocate channels at the end of each training epoch.

    Convert the network in the `LightningModule`'s `__init__`, so that `configure_optimizers` and
    checkpoints see the selective layers. The callback makes a `ChannelAllocator` of the module and
    the optimizer that trains it, steps it on every rank, logs `selectconv/moved` and
    `selectconv/closed`, and saves and restores its state with Lightning's checkpoints.

    A checkpoint that Lightning writes during validation does not contain the epoch's step. A
    training that continues from it takes this step before its next epoch.

    Args:
        total_epochs: the length of the training. None: the trainer's `max_epochs`.
        log: whether to log the numbers of moved and closed slots.
        followers: copies of the `LightningModule` that get the same plan. Those of Lightning's
            callbacks that average weights are found.
        options: the other options of `ChannelAllocator`: gamma, top_k, stop_at, grace, mode, ...
            A target (`target_macs`) counts the `LightningModule`'s own `forward`.

    Attributes:
        allocator: the allocator, once the training has begun.
        reports: what this process's steps changed, in order; `report.to_dict()` is a row of a log.

    Raises:
        AllocationError: when the training begins: there are no selective layers, the optimizer
            does not own their parameters, or the trainer has no `max_epochs`.

    Example:
        >>> callback = ChannelAllocation(gamma=0.05, grace=2)
        >>> trainer = Trainer(max_epochs=10, callbacks=[callback], logger=False)
    """

    def __init__(
        self,
        *,
        total_epochs: int | None = None,
        log: bool = True,
        followers: Iterable[nn.Module] = (),
        **options: Any,
    ) -> None:
        # Refuse what the allocator would refuse now, not after the data has been loaded.
        Settings(1, **{name: value for name, value in options.items() if name not in _OTHERS})
        self.total_epochs = total_epochs
        self._logs = log  # Lightning gives every callback a `log` of its own
        self.followers = list(followers)
        self.options = options
        self.allocator: ChannelAllocator | None = None
        self.reports: list[AllocationReport] = []
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the allocator: the optimizers are set up, and the model's state is restored."""
        epochs = trainer.max_epochs if self.total_epochs is None else self.total_epochs
        if epochs is None or epochs < 1:
            raise AllocationError(
                "the trainer has no `max_epochs`: give ChannelAllocation `total_epochs`."
            )
        self.allocator = ChannelAllocator(
            pl_module,
            trainer.optimizers,
            total_epochs=epochs,
            followers=[*self.followers, *_averages(trainer)],
            **self.options,
        )
        if self._restored is not None:
            self.allocator.load_state_dict(self._restored)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for the step that a checkpoint from within validation does not have."""
        if self._restored is not None:
            self._step(trainer.current_epoch - 1)
        self._restored = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Step the allocator, and log."""
        self._step(trainer.current_epoch)
        if self._logs:
            counts = {
                f"selectconv/{name}": float(count) for name, count in count_slots(pl_module).items()
            }
            pl_module.log_dict(counts, sync_dist=trainer.world_size > 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the allocator's state, for Lightning's checkpoints."""
        return {} if self.allocator is None else {"allocator": self.allocator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state for the allocator, which is built after restoring."""
        self._restored = state_dict.get("allocator")

    def _step(self, epoch: int) -> None:
        """Step the allocator, unless it has taken this step before."""
        assert self.allocator is not None
        if self.allocator.last_epoch < epoch and (report := self.allocator.step(epoch)):
            self.reports.append(report)


def _averages(trainer: Any) -> list[nn.Module]:
    """Return the averages of Lightning's callbacks: WeightAveraging, StochasticWeightAveraging."""
    return [
        average
        for callback in trainer.callbacks
        if isinstance(average := getattr(callback, "_average_model", None), nn.Module)
    ]
