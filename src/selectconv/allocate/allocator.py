"""The training scheme of Section 2.3 beside any training loop: one `step` per epoch.

An allocator decides (a plan), agrees with the other processes, then does: on the model, on its
followers, and on what the optimizer remembers of re-opened slots. It owns no loop, wraps nothing
and never calls the optimizer.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import nn

from selectconv.allocate.agreement import agree, in_process_group
from selectconv.allocate.allocator_state import STATE_VERSION, read_state, warn_of_changes
from selectconv.allocate.auto_gamma import AutoGamma
from selectconv.allocate.averages import UnnamedAverages
from selectconv.allocate.budget import Budget, check_targets
from selectconv.allocate.decision import Decision
from selectconv.allocate.log import Log, read_log
from selectconv.allocate.optimizer_state import decays
from selectconv.allocate.preview import GammaTable, tabulate_gammas
from selectconv.allocate.replicas import Replicas
from selectconv.allocate.report import AllocationReport
from selectconv.checks import (
    check_choice,
    check_count,
    check_fraction,
    check_gamma,
    check_seed,
    warn,
)
from selectconv.core.allocation import ReallocRule
from selectconv.core.damage import DAMAGES
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import count_slots, selective_layers, unwrap
from selectconv.core.plan import AllocationPlan
from selectconv.core.threads import one_thread
from selectconv.errors import AllocationError
from selectconv.graph.example import as_arguments

MODES = ("select", "zero", "random", "dealloc", "shift", "none")


class ChannelAllocator:
    """De- and re-allocate the channels of a model's selective layers while it trains.

    Call `step(epoch)` after each epoch. In a process group, rank 0 decides and all ranks get the
    same allocation, so all ranks must make the same calls.

    Args:
        model: a model with selective layers (`sc.convert`, `sc.create_model(selective=True)`).
        optimizer: the optimizer that trains the model, or None. When a slot is re-opened, the
            allocator clears the slot's optimizer state and the pending gradients of its weight and
            shift. It changes nothing else in the optimizer.
        total_epochs: the length of the training.
        gamma: the largest share of any output that one step may remove. "auto": each step solves
            for the gamma that closes a share of the slots that suits the length of the training;
            `grace` is then at least a tenth of the training.
        top_k: K: a re-opened slot reads what one of the K most important slots reads.
        max_copies: N_max, the most copies of a channel. None: no limit.
        stop_at: the first part of the training, from 0 to 1, in which steps act.
        grace: for how many epochs a re-opened slot cannot be closed again. 0: as in the paper.
        mode: "select" (+D+R^zero+shift), "zero", "random", "dealloc", "shift" (+S) or "none".
        damage: "auto", "mean" (the paper) or "rms", as for `SelectConv2d.ecdm`.
        seed: seeds the allocator's own random numbers. It never draws from torch's global ones.
        target_macs: end with this fraction of the dense model's multiply-adds. Each step solves
            for the gamma that meets a budget, which falls from step to step. In modes that
            re-allocate, a step closes at least what `gamma` would close.
        target_params: the same for parameters. Give at most one of the two targets.
        example_input: as for `sc.count`; needed for a target, and for the cost in `preview`.
        followers: copies of the model, such as an EMA of its weights, that get the same plan.

    Raises:
        TypeError, ValueError: an argument is not accepted, or a target cannot be reached.
        CompressionError: there is a target, and the model cannot be counted.
        AllocationError: the model has no selective layers, the optimizer does not own their
            parameters, or followers differ from the model.

    Example:
        >>> import selectconv as sc, torch
        >>> model = sc.create_model("densenet40", selective=True)
        >>> optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, weight_decay=1e-4)
        >>> allocator = ChannelAllocator(model, optimizer, total_epochs=10, gamma=0.03)
        >>> print(allocator.step(epoch=0))  # doctest: +ELLIPSIS
        epoch 0: ... de-allocated, ... re-allocated in ...
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        total_epochs: int,
        gamma: float | str = 1e-3,
        top_k: int = 3,
        max_copies: int | None = 32,
        stop_at: float = 0.5,
        grace: int = 0,
        mode: str = "select",
        damage: str = "auto",
        seed: int = 0,
        target_macs: float | None = None,
        target_params: float | None = None,
        example_input: Any = None,
        followers: Iterable[nn.Module] = (),
    ) -> None:
        self.total_epochs = check_count("total_epochs", total_epochs, 1)
        self.gamma = check_gamma("gamma", gamma)
        self.stop_at = check_fraction("stop_at", stop_at)
        self.grace = check_count("grace", grace, 0)
        self.mode = check_choice("mode", mode, MODES)
        self.damage = check_choice("damage", damage, DAMAGES)
        init = "random" if mode == "random" else "zero"
        shifts = mode not in ("zero", "random")
        self.rule = ReallocRule(top_k, max_copies, init, use_shift=shifts)
        self.model = unwrap(model)
        self.optimizer = optimizer
        if example_input is not None:
            as_arguments(example_input)  # checks it
        self._example_input = example_input
        self.last_epoch = -1
        self._is_overtime = False  # whether the warning was given
        self.generator = torch.Generator().manual_seed(check_seed("seed", seed))
        if mode != "none" and not selective_layers(self.model):
            raise AllocationError(
                "`model` has no selective layers: call sc.convert(model) first, "
                "or sc.create_model(..., selective=True)."
            )
        self._replicas = Replicas(self.model, optimizer, followers)
        self._averages = UnnamedAverages(self.layers, self._replicas.all[1:])
        if optimizer is not None and self._closes and not decays(optimizer, self.layers):
            warn(
                "`optimizer` has a weight decay of 0: weight decay makes slots fade; without it "
                "few are ever de-allocated. Give the optimizer a weight_decay, such as 1e-4."
            )
        num_steps = math.ceil(self.stop_at * self.total_epochs)
        self.budget: Budget | None = None
        if target := check_targets(target_macs, target_params):
            if not self._closes:
                raise ValueError(f"`{target[0]}` needs a `mode` that closes slots, got {mode!r}.")
            self.budget = Budget(self.model, *target, example_input, num_steps)
        level: float | AutoGamma
        if isinstance(self.gamma, str):
            if self.budget is not None:
                raise ValueError(
                    f"`gamma` 'auto' and `{self.budget.name}` cannot be combined: a target solves "
                    "for gamma itself."
                )
            level = AutoGamma(self.total_epochs, self.stop_at, reopens=self._reopens)
            self.grace = max(self.grace, level.grace)
        else:
            level = self.gamma
        self._decision = Decision(
            self.model,
            self.layers,
            gamma=level,
            damage=self.damage,
            rule=self.rule,
            grace=self.grace,
            budget=self.budget,
        )
        if mode == "shift":
            self._replicas.shift_everything(self.rule.max_shift, self.generator)

    @property
    def layers(self) -> dict[str, SelectConvNd]:
        """The model's selective layers by name."""
        return self._replicas.layers

    def step(self, epoch: int) -> AllocationReport:
        """De-allocate, then re-allocate, as long as `epoch < stop_at * total_epochs`.

        Call it once per epoch.

        Args:
            epoch: the epoch that has ended, counted from 0; larger at each call.

        Returns:
            What was done. The report is false if nothing changed.

        Raises:
            AllocationError: the epoch was stepped already, weights or statistics are NaN or
                infinite, a batch norm is no longer in the model, or the optimizer's state cannot
                be cleared for a slot. Model and optimizer stay as they were.
            MeanSourceError: a layer does not know the mean of its input.
        """
        epoch = check_count("epoch", epoch, 0)
        if epoch <= self.last_epoch:
            raise AllocationError(
                f"`epoch` {epoch} was stepped already (the last was {self.last_epoch}): "
                "call step once per epoch, or dealloc() and realloc() on demand."
            )
        if epoch >= self.total_epochs and not self._is_overtime:
            self._is_overtime = True
            warn(
                f"`epoch` {epoch} is past `total_epochs` {self.total_epochs} (epochs count from "
                "0): the step does nothing."
            )
        acts = epoch < self.stop_at * self.total_epochs and self._closes
        # Shifts go on learning, and with them the cost changes: a budget is kept to the end.
        acts = acts or (self.budget is not None and self._reopens)
        plan = AllocationPlan()
        if acts:
            self._averages.check()
            plan = self._act(True, self._reopens, epoch, is_scheduled=True)
        self.last_epoch = epoch
        cost = self.budget.describe(self.layers) if self.budget is not None and acts else ""
        return AllocationReport(epoch, plan, cost=cost, is_over=self._closes and not acts)

    def dealloc(self) -> AllocationReport:
        """De-allocate now, at any time and in any mode; raises what `step` raises.

        With `gamma="auto"` it closes the same share of the slots as the first step that acts.
        """
        return AllocationReport(None, self._act(closes=True, reopens=False, epoch=self.last_epoch))

    def realloc(self) -> AllocationReport:
        """Re-allocate now, at any time and in any mode; raises what `step` raises."""
        return AllocationReport(None, self._act(closes=False, reopens=True, epoch=self.last_epoch))

    @overload
    def preview(self, gammas: None = None) -> AllocationReport: ...

    @overload
    def preview(self, gammas: Iterable[float]) -> GammaTable: ...

    def preview(self, gammas: Iterable[float] | None = None) -> AllocationReport | GammaTable:
        """Return what the next step would do if it acted, and the smallest gamma that would act.

        Layers that observe the mean of their input know nothing before the first batch. The report
        names them and answers for the other layers; with a target, which needs all layers, it
        answers for none. Nothing is changed. Raises what `step` raises.

        Args:
            gammas: compare these values instead of the allocator's own gamma. Returns a table of
                the slots that a step would close at each, and of the layers and cost that would be
                left. `print` it, or call `.plot()`. The cost is known if the allocator has an
                `example_input` and the model can be counted.
        """
        if gammas is not None:
            protected = {
                name: self._decision.protected(name, self.last_epoch + 1) for name in self.layers
            }
            return tabulate_gammas(
                self.model,
                gammas,
                damage=self.damage,
                protected=protected,
                example_input=self._example_input,
            )
        if not self._closes:
            return AllocationReport(None, AllocationPlan())
        epoch = self.last_epoch + 1
        unknown = tuple(name for name, layer in self.layers.items() if not layer.knows_mean())
        known = {name: layer for name, layer in self.layers.items() if name not in unknown}
        if unknown and self.budget is not None:
            return AllocationReport(None, AllocationPlan(), unknown=unknown)
        generator = self._copy_generator()
        plan = self._decision.plan(known, True, self._reopens, epoch, generator, is_scheduled=True)
        smallest = self._decision.smallest_gamma(known, epoch)
        return AllocationReport(None, plan, smallest, unknown)

    def apply(self, plan: AllocationPlan) -> None:
        """Carry out a plan from a report or a log, on the model, its followers and the optimizer.

        Raises:
            AllocationError: the plan does not fit the model. Nothing was changed.
        """
        self._do(plan, self.last_epoch)

    def replay(self, log: Log) -> list[AllocationReport]:
        """Carry out all steps of a log, in order, on a fresh copy of the model of that log.

        The model ends with the log's allocation. Shifts are those that were drawn, not what they
        learned later, and re-opened slots have no trained weights. Training continues with the
        epoch after the last one in the log.

        Args:
            log: the path of a run's `allocation.jsonl`, or rows as `AllocationReport.to_dict`
                returns them. In a process group, all ranks need the same log.

        Returns:
            One report per row.

        Raises:
            AllocationError: the log cannot be read, or does not fit the model. Nothing was
                changed.

        Example:
            >>> import selectconv as sc
            >>> model = sc.create_model("densenet40", selective=True)
            >>> name = next(name for name, m in model.named_modules() if hasattr(m, "gate"))
            >>> log = [{"epoch": 0, "layers": {name: {"closed": [2], "opened": []}}}]
            >>> print(*ChannelAllocator(model, total_epochs=10).replay(log))
            epoch 0: 1 slot de-allocated, 0 re-allocated in 1 layer
        """
        reports = read_log(log)
        self._replicas.broadcast()
        self._replicas.rehearse(report.plan for report in reports)
        for report in reports:
            if report.epoch is not None:
                self.last_epoch = max(self.last_epoch, report.epoch)
            self._do(report.plan, self.last_epoch)
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides the model's own state: tensors and plain types."""
        state = {
            "version": STATE_VERSION,
            "settings": self._settings(),
            "last_epoch": self.last_epoch,
            "generator": self.generator.get_state(),
            "opened_at": {
                name: epochs.clone() for name, epochs in self._decision.opened_at.items()
            },
        }
        return state if self.budget is None else {**state, "budget": self.budget.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` returned; load the model's own state into the model.

        This allocator keeps its own settings; a warning names those that differ.

        Raises:
            AllocationError: the state is from another version or architecture. Nothing was
                changed.
        """
        read = read_state(state, self.layers, has_budget=self.budget is not None)
        if self.budget is not None:
            self.budget.check_state(state["budget"])
        if self.budget is not None:
            self.budget.gamma = state["budget"]["gamma"]
        warn_of_changes(read.settings, self._settings())
        self.last_epoch = read.last_epoch
        self.generator.set_state(read.generator)
        self._decision.opened_at = read.opened_at

    def __repr__(self) -> str:
        slots = count_slots(self.model)
        words = [f"{name}={value!r}" for name, value in self._settings().items()]
        if self.budget is not None:
            words.append(f"{self.budget.name}={self.budget.fraction:g}")
        words += [f"layers={len(self.layers)}", f"last_epoch={self.last_epoch}"]
        words += [f"moved={slots.moved}", f"closed={slots.closed}"]
        return f"{type(self).__name__}({', '.join(words)})"

    def _settings(self) -> dict[str, Any]:
        """Return what decides how the allocator acts, as plain types."""
        return {
            "mode": self.mode,
            "gamma": self.gamma,
            "top_k": self.rule.top_k,
            "max_copies": self.rule.max_copies,
            "total_epochs": self.total_epochs,
            "stop_at": self.stop_at,
            "grace": self.grace,
            "damage": self.damage,
        }

    @property
    def _closes(self) -> bool:
        return self.mode not in ("shift", "none")

    @property
    def _reopens(self) -> bool:
        return self.mode in ("select", "zero", "random")

    def _act(
        self, closes: bool, reopens: bool, epoch: int, *, is_scheduled: bool = False
    ) -> AllocationPlan:
        """Decide, agree and act. If any of it fails, no random numbers are used up either."""
        generator = self._copy_generator()

        def decide() -> AllocationPlan:
            return self._decision.plan(
                self.layers, closes, reopens, epoch, generator, is_scheduled=is_scheduled
            )

        with one_thread():
            plan = self._agree(decide, generator)
            self._do(plan, epoch)
        self.generator.set_state(generator.get_state())
        if self.budget is not None and is_scheduled:
            self.budget.gamma = self.budget.solved
        return plan

    def _copy_generator(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        return generator

    def _do(self, plan: AllocationPlan, epoch: int) -> None:
        """Carry a plan out on all replicas."""
        self._replicas.apply(plan)
        for name, layer_plan in plan:
            self._decision.opened_at[name][layer_plan.opened] = epoch

    def _agree(
        self, decide: Callable[[], AllocationPlan], generator: torch.Generator
    ) -> AllocationPlan:
        """Let rank 0 decide; give every rank its plan and its random numbers, or its error."""
        if not in_process_group():
            return decide()

        def describe() -> dict[str, Any]:
            plan = decide()
            return {
                "plan": plan.to_dict(),
                "generator": generator.get_state().tolist(),
                "gamma": None if self.budget is None else self.budget.solved,
            }

        content = agree(describe, self._replicas.device)
        generator.set_state(torch.tensor(content["generator"], dtype=torch.uint8))
        if self.budget is not None:
            self.budget.solved = content["gamma"]
        return AllocationPlan.from_dict(content["plan"])
