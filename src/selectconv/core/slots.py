"""A conv's slots: what each reads, and Section 2.3's two operations, which close and re-open them.

How much a slot matters is in `damage`; what is computed from the slots is in `layer`.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from selectconv.checks import check_choice, check_flag, check_fraction
from selectconv.core.allocation import ReallocRule, choose_dealloc, choose_sources, realloc_scores
from selectconv.core.damage import DAMAGES, DamageConvNd, split_groups
from selectconv.core.ecdm import normalize_ecdm
from selectconv.core.plan import LayerPlan
from selectconv.errors import AllocationError

new_family = itertools.count().__next__
living_layers: WeakSet[Any] = WeakSet()
"""All selective layers of this process, so that an average beside a model can be noticed."""


class SlottedConvNd(DamageConvNd):
    """A conv with an allocation: the part of `SelectConvNd` that decides and keeps it.

    Attributes:
        moved: (I,) bool buffer: the slots that have been re-allocated.
        shifted: (I,) bool buffer: the slots that read with a shift.
        shift: (I, spatial axes) parameter, b: the shifts in pixels. None: the layer does not
            re-allocate.
        weight_std: standard deviation of the normal distribution that this layer's weights were
            drawn from, for R^random. None: torch's own initialisation of convs.
        family: a number that a layer and its copies have in common.
        num_loads: how often a state was loaded into the layer.
    """

    moved: Tensor
    shifted: Tensor
    shift: nn.Parameter | None
    weight_std: float | None
    family: int
    num_loads: int

    def _start_allocation(self, reallocate: bool) -> None:
        check_flag("reallocate", reallocate)
        slots, device = self.in_channels, self.weight.device
        self.register_buffer("gate", torch.ones(slots, dtype=torch.bool, device=device))
        self.register_buffer("index", torch.arange(slots, device=device))
        self.register_buffer("moved", torch.zeros(slots, dtype=torch.bool, device=device))
        self.register_buffer("shifted", torch.zeros(slots, dtype=torch.bool, device=device))
        shift = None
        if reallocate:  # frozen if the weight is
            offsets = self.weight.new_zeros(slots, self._num_axes)
            shift = nn.Parameter(offsets, requires_grad=self.weight.requires_grad)
        self.register_parameter("shift", shift)
        self.weight_std = None
        self._mean_source = None
        self.family = new_family()
        self.num_loads = 0
        living_layers.add(self)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Load the layer; the state of a plain conv means a fresh allocation."""
        fresh = self._fresh_allocation(state.get(prefix + "weight"))
        if not any(prefix + name in state for name in fresh):
            state.update({prefix + name: value for name, value in fresh.items()})
        index = state.get(prefix + "index")
        if isinstance(index, Tensor) and index.numel() and not index.is_meta:
            low, high = (int(bound) for bound in torch.aminmax(index))
            if low < 0 or high >= self.in_channels:
                raise AllocationError(
                    f"`{prefix}index` names the channels {low} to {high}; the layer has 0 to "
                    f"{self.in_channels - 1}: the state is damaged, or from another model."
                )
        cast(Any, super())._load_from_state_dict(state, prefix, *args)
        self.num_loads += 1

    def _fresh_allocation(self, weight: Tensor | None) -> dict[str, Tensor]:
        """Return what buffers and shift hold before anything was allocated, beside a weight."""
        named = {**self._buffers, "shift": self.shift}
        device = None if weight is None else weight.device  # the layer itself may be on "meta"
        fresh = {
            name: torch.zeros_like(value, device=device)
            for name, value in named.items()
            if value is not None
        }
        fresh["gate"].fill_(True)
        fresh["index"].copy_(torch.arange(self.in_channels))
        return fresh

    def dealloc(self, gamma: float = 1e-3, damage: str = "auto") -> Tensor:
        """Close the slots that Algorithm 1 chooses; a group's last open slot stays open.

        Args:
            gamma: the largest share of any output that may be removed, in [0, 1].
            damage: as for `ecdm`.

        Returns:
            The slots that were closed, int64.

        Raises:
            AllocationError: weights or statistics are NaN or infinite. Nothing was changed.
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
            TypeError, ValueError: an argument is not accepted.
        """
        plan = self.plan(gamma=check_fraction("gamma", gamma), damage=damage)
        self.apply_plan(plan)
        return plan.closed

    def realloc(
        self,
        top_k: int = 3,
        max_copies: int | None = 32,
        init: str = "zero",
        use_shift: bool = True,
        max_shift: float = 1.5,
        norm: str = "l2",
        generator: torch.Generator | None = None,
        *,
        damage: str = "auto",
    ) -> Tensor:
        """Re-open the closed slots on the most important channels (Algorithm 2).

        It does not touch the optimizer. If momentum must be cleared, use `ChannelAllocator`.

        Args:
            top_k: K: a re-opened slot reads what one of the K most important slots reads.
            max_copies: N_max, the most copies of a channel. None: no limit.
            init: weights of re-opened slots: "zero", which changes no output, or "random", the
                ablation R^random.
            use_shift: False makes copies without a shift, the ablation R^zero.
            max_shift: shifts are drawn from U[-max_shift, max_shift], in pixels.
            norm: the norm of the scores, "l2" or "linf".
            generator: a CPU generator. None: torch's global one.
            damage: as for `ecdm`.

        Returns:
            The slots that were re-opened, int64; empty if the layer does not re-allocate.

        Raises:
            AllocationError: weights or statistics are NaN or infinite. Nothing was changed.
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
            TypeError, ValueError: an argument is not accepted.
        """
        rule = ReallocRule(top_k, max_copies, init, use_shift, max_shift, norm)
        plan = self.plan(rule=rule, damage=damage, generator=generator)
        self.apply_plan(plan)
        return plan.opened

    def close(self, slots: Tensor | Iterable[int]) -> None:
        """Close these slots by hand; slots that are already closed stay closed.

        Raises:
            AllocationError: the layer does not have one of the slots. Nothing was changed.
            TypeError: a slot is not an integer.
        """
        is_bare = isinstance(slots, Iterable) and not hasattr(slots, "__getitem__")  # sets
        try:
            closed = torch.as_tensor(list(slots) if is_bare else slots)
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(f"`slots` must be integers, got {slots!r}.") from None
        if closed.numel() and (
            closed.is_floating_point() or closed.is_complex() or closed.dtype == torch.bool
        ):
            raise TypeError(f"`slots` must be integers, got {closed.dtype}.")
        closed = closed.flatten().to("cpu", torch.int64)
        if outside := closed[(closed < 0) | (closed >= self.in_channels)].tolist():
            raise AllocationError(
                f"`slots` names {outside[:5]}; the layer has 0 to {self.in_channels - 1}."
            )
        self.apply_plan(LayerPlan(closed=closed))

    @torch.no_grad()
    def plan(
        self,
        *,
        gamma: float | None = None,
        rule: ReallocRule | None = None,
        damage: str = "auto",
        protected: Tensor | None = None,
        closed: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LayerPlan:
        """Decide what `dealloc` and then `realloc` would do; changes nothing.

        Args:
            gamma: as for `dealloc`. None: close nothing but `closed`.
            rule: how to re-open. None, or a layer without `shift`: re-open nothing.
            damage: as for `ecdm`.
            protected: (I,) bool, slots that must stay open.
            closed: int64, open slots to close, instead of those that a `gamma` chooses.
            generator: a CPU generator. None: torch's global one.

        Raises:
            AllocationError: weights or statistics are NaN or infinite.
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
        """
        check_choice("damage", damage, DAMAGES)
        if generator is not None and (
            not isinstance(generator, torch.Generator) or generator.device.type != "cpu"
        ):
            raise TypeError(f"`generator` must be a torch.Generator of the CPU, got {generator!r}.")
        if self.shift is None:
            rule = None
        if closed is None and gamma is None and rule is None:
            return LayerPlan()
        necdm = self._finite_necdm(damage)
        if closed is None:
            closed = torch.empty(0, dtype=torch.int64, device=self.gate.device)
        closed = closed.to(self.gate.device)
        if gamma is not None:
            closed = self._choose_closed(necdm, gamma, protected)
        gate = self.gate.index_fill(0, closed, False)
        if rule is None or bool(gate.all()):
            return LayerPlan(closed=closed.cpu())
        necdm = normalize_ecdm(necdm.index_fill_(0, closed, 0.0))
        scores = realloc_scores(necdm, self.index, gate, rule.max_copies, rule.norm)
        index = self.index.cpu()
        opened, source = choose_sources(scores.cpu(), index, gate.cpu(), rule, generator)
        shift = draw_shift(len(opened), self._num_axes, rule.max_shift, generator)
        seed = (
            int(torch.randint(2**62, (), generator=generator, device="cpu"))
            if rule.init == "random"
            else None
        )
        return LayerPlan(
            closed=closed.cpu(),
            opened=opened,
            source=source,
            shift=shift if rule.use_shift else None,
            weight_seed=seed,
        )

    def check_owns_weight(self) -> None:
        """Check that the weight is a parameter: what is written into another is soon lost.

        Raises:
            AllocationError: a hook or a parametrization recomputes it.
        """
        if "weight" not in self._parameters:
            raise AllocationError(
                "a hook or a parametrization (prune, weight_norm, spectral_norm) recomputes the "
                "weight, so slots cannot be re-allocated: remove it, such as with "
                "torch.nn.utils.prune.remove(layer, 'weight')."
            )

    def check_plan(self, plan: LayerPlan) -> None:
        """Check that a plan fits this layer and its present allocation.

        Raises:
            AllocationError: it names slots or channels that do not exist, or re-opens open ones, or
                the layer's weight is recomputed.
        """
        self.check_owns_weight()
        plan.check(self.gate.cpu(), self._num_axes, can_open=self.shift is not None)

    def apply_plan(self, plan: LayerPlan) -> None:
        """Carry out a plan: close, then re-open with weights and shifts of their own.

        Raises:
            AllocationError: the plan does not fit the layer; nothing was changed.
        """
        self.check_plan(plan)
        self.apply_checked_plan(plan)

    @torch.no_grad()
    def apply_checked_plan(self, plan: LayerPlan) -> None:
        """Carry out a plan that `check_plan` has accepted."""
        # Drawn before anything changes: a seed may be refused.
        weight = None if plan.weight_seed is None else self._draw_weight(plan)
        device = self.weight.device
        self.gate.index_fill_(0, plan.closed.to(device), False)
        if len(plan.opened) == 0 or self.shift is None:
            return
        opened = plan.opened.to(device)
        self.gate.index_fill_(0, opened, True)
        self.moved.index_fill_(0, opened, True)
        self.shifted.index_fill_(0, opened, plan.shift is not None)
        self.index.index_copy_(0, opened, plan.source.to(device))
        if plan.shift is None:
            self.shift.index_fill_(0, opened, 0.0)
        else:
            self.shift.index_copy_(0, opened, plan.shift.to(self.shift))
        if weight is None:
            self.zero_slots(self.weight, opened)
        else:
            by_group = split_groups(self.weight, self.groups)
            by_group[self._group_and_slot(opened)] = weight.to(self.weight)

    def rerouted(self) -> Tensor:
        """Return (I,) bool: the open slots that read anything but their own channel as it is."""
        own = torch.arange(self.in_channels, device=self.index.device)
        return self.gate & (self.shifted | (self.index != own))

    def slot_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that hold something of each slot."""
        yield self.weight
        if self.shift is not None:
            yield self.shift

    def zero_slots(self, tensor: Tensor, slots: Tensor) -> None:
        """Zero in place what belongs to `slots` in a tensor laid out as a slot parameter."""
        slots = slots.to(tensor.device)
        if tensor.ndim <= 2:  # one row per slot; weights have at least three axes
            tensor.index_fill_(0, slots, 0)
        elif self.groups == 1:
            tensor.index_fill_(1, slots, 0)  # many times faster than what follows
        else:
            split_groups(tensor, self.groups)[self._group_and_slot(slots)] = 0

    def extra_repr(self) -> str:
        """Add the allocation to what a plain conv shows."""
        plain = str(cast(Any, super()).extra_repr())
        if self.gate.is_meta:
            return plain
        is_open = int(self.gate.sum())
        moved = int((self.moved & self.gate).sum())
        return f"{plain}, open={is_open}, moved={moved}"

    @property
    def _num_axes(self) -> int:
        return len(self.kernel_size)

    def _choose_closed(self, necdm: Tensor, gamma: float, protected: Tensor | None) -> Tensor:
        if protected is None:
            chosen = choose_dealloc(necdm, gamma)
        else:
            free = (~protected.to(necdm.device)).nonzero().flatten()
            chosen = free[choose_dealloc(necdm[free], gamma)]
        chosen = chosen[self.gate[chosen]]  # closed slots have zero rows: they always fit
        is_chosen = torch.zeros_like(self.gate).index_fill_(0, chosen, True)
        # Never a group's last open slot: the one that Algorithm 1 would take last stays.
        by_group = (self.gate & ~is_chosen).view(self.groups, -1)
        spent = ~by_group.any(dim=1) & is_chosen.view(self.groups, -1).any(dim=1)
        if bool(spent.any()):
            size = necdm.amax(dim=1).masked_fill(~is_chosen, -1.0).view(self.groups, -1)
            last = size.shape[1] - 1 - size.flip(1).argmax(dim=1)  # the highest index among equals
            is_chosen.view(self.groups, -1)[spent, last[spent]] = False
        return is_chosen.nonzero().flatten()

    def _group_and_slot(self, slots: Tensor) -> tuple[Tensor, slice, Tensor]:
        width = self.in_channels // self.groups
        return slots // width, slice(None), slots % width

    def _draw_weight(self, plan: LayerPlan) -> Tensor:
        """Draw weights (B, O / groups, ...) from the layer's own initialisation: R^random."""
        generator = torch.Generator().manual_seed(cast(int, plan.weight_seed))
        shape = (len(plan.opened), self.out_channels // self.groups, *self.kernel_size)
        if self.weight_std is not None:
            return torch.randn(shape, generator=generator, device="cpu") * self.weight_std
        # torch draws a conv's weights from U(-bound, bound) with bound = 1 / sqrt(fan in).
        bound = self.weight[0].numel() ** -0.5
        return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def draw_shift(
    count: int, axes: int, max_shift: float, generator: torch.Generator | None
) -> Tensor:
    """Draw shifts uniformly from [-max_shift, max_shift] pixels along each axis."""
    return (torch.rand(count, axes, generator=generator, device="cpu") * 2 - 1) * max_shift
