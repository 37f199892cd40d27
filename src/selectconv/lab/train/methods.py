"""The methods of `--method`: one row each, and what the training loop asks of all of them.

A new method is one row in `METHODS` and one class that carries it out; the settings, the loop, the
network, the plan that is printed before a run, and the report read the row. Importing this file
does not import torch: the class is loaded when a run needs it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from selectconv.allocate.report import AllocationReport
    from selectconv.lab.data.image_set import DatasetInfo


class Plain:
    """What a method does to the channels of a network; this one leaves them alone.

    The other methods replace what they do differently.
    """

    @classmethod
    def build(
        cls, config: Any, info: "DatasetInfo", model: "nn.Module", optimizer: "Optimizer"
    ) -> Self:
        """Set the method up for a run with these settings (a `TrainConfig`)."""
        return cls()

    def regularize(self) -> None:
        """Add the gradient of the method's penalty, after `backward` and before the step."""

    def step(self, epoch: int) -> "AllocationReport":
        """Act on the channels after an epoch (0-based); the report is false if nothing changed."""
        from selectconv.allocate.report import AllocationReport
        from selectconv.core.plan import AllocationPlan

        return AllocationReport(epoch, AllocationPlan())

    def counts(self) -> dict[str, int]:
        """Count the channels that are `moved` and `closed`, for a line of metrics."""
        return {"moved": 0, "closed": 0}

    def state_dict(self) -> dict[str, Any] | None:
        """Return what resuming needs beyond the model; None: nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from what `state_dict` returned."""

    @staticmethod
    def apply_log(model: "nn.Module", log: Iterable["AllocationReport"]) -> None:
        """Bring a fresh network into the form that the lines of `allocation.jsonl` lead to.

        Nothing to do where a log does not change the form: it is replayed slot by slot.
        """

    @staticmethod
    def finish(model: "nn.Module") -> "nn.Module":
        """Return a trained network as it is deployed."""
        return model


@dataclass(frozen=True)
class MethodInfo:
    """What the rest of the package knows about a method.

    Attributes:
        name: what users type.
        paper_name: what the paper's tables call it.
        words: what it does, for the plan of a run; `{goal}` and `{part}` stand for how much is
            closed and in which part of the training.
        colour: its colour in figures. All are of equal lightness, to read on white and on black.
        rank: its place among the rows of a table, which follow Section 3.3.
        run_by: `module:class` of what carries it out, a subclass of `Plain`.
        uses: the settings about channel selection that make a difference to it; `realloc` is an
            option of the network.
        is_selective: its network has selective convs.
        moves: it re-allocates slots.
        shifts: its slots are shifted; all of them, if it moves none.
        cuts: it cuts channels out, which gives the network new parameters of other shapes.
        has_penalty: it adds a penalty to the gradients.
        is_baseline: other methods are compared with it.
        needs_model: the only network that it works on; None: any.
        network_options: options of the zoo's network that it needs.
        target_macs: the target where none is given, as a part of the multiply-adds.
    """

    name: str
    paper_name: str
    words: str
    colour: str
    rank: int
    run_by: str
    uses: tuple[str, ...] = ()
    is_selective: bool = False
    moves: bool = False
    shifts: bool = False
    cuts: bool = False
    has_penalty: bool = False
    is_baseline: bool = False
    needs_model: str | None = None
    network_options: Mapping[str, Any] = field(default_factory=dict)
    target_macs: float | None = None

    @property
    def has_target(self) -> bool:
        """Whether it can be told the cost to end at."""
        return "target_macs" in self.uses

    @property
    def only_closes(self) -> bool:
        """Whether its selective convs close slots and never re-open one."""
        return self.is_selective and not (self.moves or self.shifts)

    def implementation(self) -> type[Plain]:
        """Load the class that carries it out."""
        module, _, name = self.run_by.partition(":")
        return cast(type[Plain], getattr(import_module(module), name))


_SELECTIVE = "selectconv.lab.train.channels:Selective"
_ALLOCATION = ("gamma", "top_k", "max_copies", "stop_at", "grace", "damage", "shift_weight_decay",
               "target_macs", "target_params", "realloc")  # fmt: skip


def _allocating(
    name: str,
    paper_name: str,
    words: str,
    colour: str,
    rank: int,
    *,
    moves: bool = True,
    shifts: bool = False,
) -> MethodInfo:
    """Return the row of a method that de-allocates, and re-allocates if it `moves`."""
    return MethodInfo(
        name=name,
        paper_name=paper_name,
        words=f"{words}; {{goal}}, in {{part}}",
        colour=colour,
        rank=rank,
        run_by=_SELECTIVE,
        uses=_ALLOCATION,
        is_selective=True,
        moves=moves,
        shifts=shifts,
    )


METHODS = {
    method.name: method
    for method in (
        MethodInfo(
            name="plain",
            paper_name="plain",
            words="plain convolutions",
            colour="#7f8c99",
            rank=0,
            run_by="selectconv.lab.train.methods:Plain",
            is_baseline=True,
        ),
        _allocating(
            "select",
            "+D+R zero+shift (select)",
            "de-allocation, re-allocation with shifts",
            "#d6459b",  # the paper's magenta
            rank=5,
            shifts=True,
        ),
        _allocating(
            "zero",
            "+D+R zero",
            "de-allocation, re-allocation without shifts",
            "#2fa37c",
            rank=2,
        ),
        _allocating(
            "random",
            "+D+R random",
            "de-allocation, re-allocation without shifts and with random weights",
            "#b58a2a",
            rank=3,
        ),
        _allocating("dealloc", "+D", "de-allocation only", "#3f8fd2", rank=1, moves=False),
        MethodInfo(
            name="shift",
            paper_name="+S",
            words="a shift for every 1x1 slot, no allocation",
            colour="#8f7be0",
            rank=4,
            run_by=_SELECTIVE,
            uses=("realloc", "shift_weight_decay"),
            is_selective=True,
            shifts=True,
        ),
        MethodInfo(
            name="lgc",
            paper_name="LGC",
            words="learned group convolutions, condensed after 1/6, 2/6 and 3/6 of the epochs",
            colour="#c9603f",
            rank=6,
            run_by="selectconv.lab.train.channels:LearnedGroups",
            uses=("group_lasso",),
            has_penalty=True,
            is_baseline=True,
            needs_model="condensenet182",
            # CondenseNet's own: each group of filters ends with one input in four.
            network_options={"condense_factor": 4},
        ),
        MethodInfo(
            name="slimming",
            paper_name="slimming",
            words="a penalty makes batch norm scales small, then Torch-Pruning cuts their "
            "channels; {goal}, after {part}",
            colour="#5f9ea0",
            rank=7,
            run_by="selectconv.lab.train.slimming:Slimmer",
            uses=("stop_at", "target_macs", "target_params", "bn_sparsity"),
            cuts=True,
            has_penalty=True,
            target_macs=0.5,
        ),
    )
}
