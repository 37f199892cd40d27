"""The methods of `--method`: one row each.

A new method is one row in `METHODS` and, unless another row's does, a function that builds it
(`channels.py`). The settings, the loop, the network, the plan that is printed before a run, and the
report read the row. Importing this file does not import torch: a run loads what it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any


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
        run_by: the function in `channels.py` that builds a `ChannelMethod`, which carries it out.
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
    run_by: str = "plain"
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

    def build(self, *arguments: Any) -> Any:
        """Build the `ChannelMethod` of a run: settings, data set, network and optimizer."""
        channels = import_module("selectconv.lab.train.channels")  # takes seconds
        return getattr(channels, self.run_by)(*arguments)


_DEALLOC = MethodInfo(
    name="dealloc",
    paper_name="+D",
    words="de-allocation only; {goal}, in {part}",
    colour="#3f8fd2",
    rank=1,
    run_by="selective",
    uses=("gamma", "top_k", "max_copies", "stop_at", "grace", "damage", "shift_weight_decay",
          "target_macs", "target_params", "realloc", "granularity"),
    # De-allocation alone needs no shifts (the parameter counts of Table 2).
    network_options={"realloc": "none"},
    is_selective=True,
)  # fmt: skip

METHODS = {
    method.name: method
    for method in (
        MethodInfo(
            name="plain",
            paper_name="plain",
            words="plain convolutions",
            colour="#7f8c99",
            rank=0,
            is_baseline=True,
        ),
        replace(
            _DEALLOC,
            name="select",
            paper_name="+D+R zero+shift (select)",
            words="de-allocation, re-allocation with shifts; {goal}, in {part}",
            colour="#d6459b",  # the paper's magenta
            rank=5,
            moves=True,
            shifts=True,
            uses=(*_DEALLOC.uses, "shifts"),
            network_options={},
        ),
        replace(
            _DEALLOC,
            name="zero",
            paper_name="+D+R zero",
            words="de-allocation, re-allocation without shifts; {goal}, in {part}",
            colour="#2fa37c",
            rank=2,
            moves=True,
            network_options={},
        ),
        replace(
            _DEALLOC,
            name="random",
            paper_name="+D+R random",
            words="de-allocation, re-allocation without shifts and with random weights; {goal}, in "
            "{part}",
            colour="#b58a2a",
            rank=3,
            moves=True,
            network_options={},
        ),
        _DEALLOC,
        MethodInfo(
            name="shift",
            paper_name="+S",
            words="a shift for every 1x1 slot, no allocation",
            colour="#8f7be0",
            rank=4,
            run_by="selective",
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
            run_by="learned_groups",
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
            run_by="slimming",
            uses=("stop_at", "target_macs", "target_params", "bn_sparsity"),
            cuts=True,
            has_penalty=True,
            target_macs=0.5,
        ),
    )
}
