"""The training scheme of Section 2.3 beside any training loop: one `step` per epoch.

An allocator decides (a plan), agrees with the other processes, then does: on the model, on its
followers and on the optimizer's state. It owns no loop, wraps nothing, never calls the optimizer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn, overload

import torch
from torch import nn

from selectconv.allocate.agreement import agree
from selectconv.allocate.budget import Budget, CostAfter
from selectconv.allocate.decision import decide
from selectconv.allocate.filters import Filters
from selectconv.allocate.last_readers import find_last_readers
from selectconv.allocate.loop_check import LoopCheck
from selectconv.allocate.optimizers import check_owns, decays
from selectconv.allocate.replicas import Replicas
from selectconv.allocate.report import AllocationReport, GammaRow, GammaTable, Log, read_log
from selectconv.allocate.settings import STATE_VERSION, AllocatorState, Settings
from selectconv.checks import check_count, check_fraction, check_seed, warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import count_slots, unwrap
from selectconv.core.plan import AllocationPlan
from selectconv.core.threads import num_threads
from selectconv.errors import AllocationError, BadType, BadValue
from selectconv.graph.example import as_arguments
from selectconv.tables import counted

_MOST_GAMMA = 0.5  # more than half of an output in one step: rather meant as per cent


class ChannelAllocator:
    """De- and re-allocate the channels of a model's selective layers while it trains.

    Call `step(epoch)` after each epoch. In a process group, rank 0 decides and all ranks get the
    same allocation, so all ranks must make the same calls.

    Args:
        model: a model with selective layers (`sc.convert`, `sc.create_model(selective=True)`).
        optimizer: the optimizer that trains the model, a list of them, or None. When a slot is
            re-opened, the allocator clears the slot's optimizer state and the pending gradients of
            its weight and shift. It changes nothing else in the optimizer. Set
            `allocator.optimizer` if you train on with another one.
        total_epochs: the length of the training.
        gamma: the largest share of any output that one step may remove. "auto": each step solves
            for the gamma that closes a share of the slots that suits the length of the training;
            `grace` is then at least a tenth of the training. With an `example_input`, a slot stays
            if nobody else reads its channel.
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
        granularity: what a step closes: "slot", an input channel of one layer (the paper), or
            "filter", a channel in all its readers at once, so that it vanishes and the compressed
            model gathers nothing. "filter" goes with `mode="dealloc"` and needs `example_input`.
        shifts: "learned" (the paper), or "whole": re-opened slots read distinct whole-pixel offsets
            around their source, which are not trained and cost nothing in the compressed model.

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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
        followers: Sequence[nn.Module] = (),
        granularity: str = "slot",
        shifts: str = "learned",
    ) -> None:
        self.settings = Settings(
            total_epochs=total_epochs, gamma=gamma, top_k=top_k, max_copies=max_copies,
            stop_at=stop_at, grace=grace, mode=mode, damage=damage, target_macs=target_macs,
            target_params=target_params, granularity=granularity, shifts=shifts,
        )  # fmt: skip
        self.model = unwrap(model)
        if example_input is not None:
            as_arguments(example_input)  # only for its checks
        self._example_input = example_input
        self._replicas = Replicas(self.model, optimizer, followers)
        self.layers = self._replicas.layers
        if mode != "none" and not self.layers:
            raise AllocationError(
                "`model` has no selective layers: call sc.convert(model) first, "
                "or sc.create_model(..., selective=True)."
            )
        self.state = AllocatorState.fresh(self.layers, check_seed("seed", seed))
        if self.settings.closes:
            self._advise()
        self.filters = None
        if granularity == "filter":
            if example_input is None:
                raise BadValue("`granularity` 'filter' needs an `example_input`.")
            self.filters = Filters(self.model, example_input)
            self.filters.check(self._replicas.trained_by)
        self._last_readers = None
        if gamma == "auto" and self.settings.reopens and example_input is not None:
            self._last_readers = find_last_readers(self.model, example_input)
        self.budget = None
        if self.settings.target:
            self.budget = Budget(self.model, self.settings, example_input, self.filters)
        for layer in self.layers.values():
            layer.learns_shift = shifts == "learned"
        if mode == "shift":
            generator = self.state.make_generator()
            self._replicas.shift_everything(self.settings.rule.max_shift, generator)
            self.state = replace(self.state, generator=generator.get_state())
        self._loop = LoopCheck(self._replicas)

    def _advise(self) -> None:
        """Warn of settings with which steps can close nothing, or nearly everything."""
        trained = {name: layer for name, layer in self.layers.items() if not layer.is_frozen}
        optimizers, gamma = self._replicas.optimizers, self.settings.gamma
        if not trained:
            warn("all selective layers are frozen: no step touches them while they are.")
        elif optimizers and not decays(optimizers, trained):
            warn(
                "`optimizer` has a weight decay of 0: weight decay makes slots fade; without it "
                "few are ever de-allocated. Give the optimizer a weight_decay, such as 1e-4."
            )
        if gamma != "auto" and float(gamma) > _MOST_GAMMA:
            warn(
                f"`gamma` {gamma:g} is above {_MOST_GAMMA:g}: each step may remove that share of "
                "an output. It is a share, not per cent: 1% is 0.01."
            )

    @property
    def optimizer(self) -> Any:
        """What was given as optimizer; set it to train on with another one."""
        return self._replicas.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._replicas.train_with(optimizer)

    def __getstate__(self) -> NoReturn:
        raise BadType(
            "a ChannelAllocator cannot be pickled or copied: keep its state_dict(), and load that "
            "into an allocator of the other model."
        )

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step; -1 before the first."""
        return self.state.last_epoch

    def step(self, epoch: int) -> AllocationReport:
        """De-allocate, then re-allocate, once per epoch while `epoch < stop_at * total_epochs`.

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
        settings, last_epoch = self.settings, self.last_epoch
        if epoch <= last_epoch:
            raise AllocationError(
                f"`epoch` {epoch} was stepped already (the last was {last_epoch}): "
                "call step once per epoch, or dealloc() and realloc() on demand."
            )
        # Shifts go on learning, and with them the cost changes: a budget is kept to the end. Where
        # no slot is re-opened, it is met at the latest by the first step after the acting epochs.
        is_met = not settings.reopens and last_epoch + 1 >= settings.num_steps
        keeps_budget = self.budget is not None and not is_met
        acts = keeps_budget or (settings.closes and epoch < settings.num_steps)
        pace = epoch - last_epoch if last_epoch >= 0 else 1
        is_last = self.budget is not None and epoch + pace >= settings.total_epochs
        acting = max(epoch, settings.num_steps - 1) if is_last else epoch
        if not acts and last_epoch < settings.total_epochs <= epoch:
            warn(
                f"`epoch` {epoch} is past `total_epochs` {settings.total_epochs} (epochs count "
                "from 0): the step does nothing."
            )
        plan = AllocationPlan()
        if acts:
            self._loop.check()
            if last_epoch < 0 < epoch and any(count_slots(self.model).values()):
                warn(
                    f"the first `epoch` is {epoch}, and slots have been closed or moved before: to "
                    "resume, call allocator.load_state_dict, too."
                )
            plan = self._act(acting, reopens=settings.reopens)
            self._loop.after_step()
        self.state = replace(self.state, last_epoch=epoch)
        if self.filters is not None and epoch + 1 >= settings.num_steps:
            self.filters.stop_observing()
        cost = self.budget.describe() if self.budget is not None and acts else ""
        return AllocationReport(epoch, plan, cost=cost, is_over=settings.closes and not acts)

    def dealloc(self) -> AllocationReport:
        """De-allocate now, at any time; with `gamma="auto"`, as much as the first acting step."""
        return AllocationReport(None, self._act(None))

    def realloc(self) -> AllocationReport:
        """Re-allocate now, at any time and in any mode; raises what `step` raises."""
        return AllocationReport(None, self._act(None, closes=False, reopens=True))

    @overload
    def preview(self, gammas: None = None) -> AllocationReport: ...

    @overload
    def preview(self, gammas: Iterable[float]) -> GammaTable: ...

    def preview(self, gammas: Iterable[float] | None = None) -> AllocationReport | GammaTable:
        """Return what the next step would do if it acted.

        Layers that observe the mean of their input know nothing before the first batch. The report
        names them and answers for the other layers; with a target, which needs all layers, it
        answers for none. Nothing is changed. Raises what `step` raises.

        Args:
            gammas: compare these values instead of the allocator's own gamma. Returns a table of
                the slots that a step would close at each, and of the layers and cost that would be
                left. `print` it. The cost is known if the allocator has an `example_input`.
        """
        unknown = tuple(name for name, layer in self.layers.items() if not layer.knows_mean())
        known = {name: layer for name, layer in self.layers.items() if name not in unknown}
        if gammas is not None:
            return self._tabulate(gammas, known)
        settings = self.settings
        if not settings.closes or (unknown and self.budget is not None):
            return AllocationReport(None, AllocationPlan(), unknown=unknown)
        plan, _ = decide(
            settings, self.state, self.model, known, self.last_epoch + 1,
            reopens=settings.reopens, budget=self.budget, filters=self.filters,
            last_readers=self._last_readers,
        )  # fmt: skip
        return AllocationReport(None, plan, unknown)

    def apply(self, plan: AllocationPlan) -> None:
        """Carry out a plan from a report or a log, on the model, its followers and the optimizer.

        Raises:
            AllocationError: the plan does not fit the model. Nothing was changed.
        """
        if not isinstance(plan, AllocationPlan):
            raise BadType(f"`plan` must be an AllocationPlan, got {type(plan).__name__}.")
        self._carry_out(plan)
        self.state = self.state.after(plan, self.last_epoch)

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
        self._carry_out(*(report.plan for report in reports))
        for report in reports:
            epoch = max(self.last_epoch, -1 if report.epoch is None else report.epoch)
            self.state = replace(self.state, last_epoch=epoch).after(report.plan, epoch)
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides the model's own state: tensors and plain types."""
        state = {"version": STATE_VERSION, "settings": asdict(self.settings), **vars(self.state)}
        if self.filters is not None:
            state["observed"] = self.filters.observed_moments()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` returned; load the model's own state into the model.

        This allocator keeps its own settings; a warning names those that differ.

        Raises:
            AllocationError: the state is from another version or architecture. Nothing was
                changed.
        """
        self.state = AllocatorState.from_dict(state, self.settings, like=self.state)
        self._replicas.look_at_followers()
        if self.filters is not None:
            self.filters.load_moments(state.get("observed", {}))

    def __repr__(self) -> str:
        counts = {"layers": len(self.layers), **count_slots(self.model)}
        shown = {**asdict(self.settings), "last_epoch": self.last_epoch, **counts}
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({words})"

    def _act(self, epoch: int | None, closes: bool = True, reopens: bool = False) -> AllocationPlan:
        """Decide, agree and act. If it fails, no random numbers are used up either."""
        with num_threads(1):
            plan, state = agree(
                partial(self._decide, epoch, closes, reopens), next(self.model.parameters()).device
            )
            self._carry_out(plan)
        if self.filters is not None:
            self.filters.left_open = self.filters.find_open()
        self.state = state
        return plan

    def _carry_out(self, *plans: AllocationPlan) -> None:
        self._loop.before_change()
        self._replicas.apply(*plans)
        self._loop.after_change()

    def _decide(
        self, epoch: int | None, closes: bool, reopens: bool
    ) -> tuple[AllocationPlan, AllocatorState]:
        check_owns(self._replicas.optimizers, self.layers)
        if self.filters is not None:
            self.filters.check(self._replicas.trained_by)
        return decide(
            self.settings, self.state, self.model, self.layers, epoch,
            closes=closes, reopens=reopens, budget=self.budget, filters=self.filters,
            last_readers=self._last_readers,
        )  # fmt: skip

    def _tabulate(self, gammas: Iterable[float], known: Mapping[str, SelectConvNd]) -> GammaTable:
        """Count what the next step would close at each gamma, in layers that know their mean."""
        if isinstance(gammas, str) or not isinstance(gammas, Iterable):
            raise BadType(f"`gammas` must be a list of numbers in [0, 1], got {gammas!r}.")
        num_slots = sum(layer.in_channels for layer in self.layers.values())
        num_open = num_slots - count_slots(self.model)["closed"]
        example = self._example_input
        after = None if example is None else CostAfter(self.model, example, self.filters)
        rows = []
        for gamma in [check_fraction("gammas", value) for value in gammas]:
            settings = replace(self.settings, gamma=gamma)
            plan, _ = decide(
                settings, self.state, self.model, known, self.last_epoch + 1, filters=self.filters
            )
            closed = sum(len(one.closed) for name, one in plan if name in self.layers)
            cost = None if after is None else after.count(plan.layers)
            costs = (None, None) if cost is None else (cost.macs, cost.params)
            rows.append(GammaRow(gamma, closed, len(plan.layers), num_open - closed, *costs))
        table = GammaTable(rows)
        table.note = f"of {num_slots:,} slots in {counted(len(self.layers), 'layer')}"
        if unknown := [name for name in self.layers if name not in known]:
            table.note += f"\nnot known before the first batch: {', '.join(unknown)}"
        return table
