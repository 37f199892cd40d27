"""Section 2.2: the selective convolutional layer, in one, two and three dimensions.

`SelectConv(X; W) = Conv(SelectChannel(X); W)`. The allocation lives in four buffers and the `shift`
parameter, and nowhere else: nothing is cached, so loading, moving, copying or broadcasting them is
all it takes to move an allocation.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from selectconv import kernels
from selectconv.allocation import (
    LayerPlan,
    ReallocRule,
    choose_dealloc,
    choose_sources,
    realloc_scores,
)
from selectconv.checks import check_choice, check_fraction, check_tensor
from selectconv.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.errors import AllocationError, MeanSourceError
from selectconv.kernels import triton_select
from selectconv.mean_source import MeanSource, ObservedMean
from selectconv.shift import can_read, reroute

DAMAGES = ("auto", "mean", "rms")
# Multiplies of a conv, forward and backward, in the time that copying one of its inputs takes.
_COPY_COST = 100


class SelectConvNd(nn.modules.conv._ConvNd):
    """What the three selective convolutions share; use `SelectConv1d`, `-2d` or `-3d`.

    The arguments are those of torch's convs; `reallocate=False` leaves the layer without a `shift`:
    it can close slots but not re-open them. With `groups`, a slot may read a channel of any group.

    Attributes:
        gate: (I,) bool buffer, g: the open slots.
        index: (I,) int64 buffer, pi: the channel that each slot reads.
        moved: (I,) bool buffer: the slot has been re-allocated.
        shifted: (I,) bool buffer: a shift applies to the slot.
        shift: (I, spatial axes) parameter, b: the shifts in pixels; None without re-allocation.
        weight_std: standard deviation of the normal distribution that this layer's weights were
            drawn from, for R^random; None: torch's own initialisation of convs.
    """

    gate: Tensor
    index: Tensor
    moved: Tensor
    shifted: Tensor
    shift: nn.Parameter | None
    observed_mean: Tensor
    observed_var: Tensor
    observed_batches: Tensor
    weight_std: float | None
    _plain_type: type[nn.modules.conv._ConvNd]
    # Whether the layer does all of SelectChannel; what only does a part cannot be compressed.
    is_whole = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        reallocate: bool = True,
    ) -> None:
        # The next __init__ is that of nn.Conv1d, nn.Conv2d or nn.Conv3d, which all take the same.
        plain_init = cast(Any, super().__init__)
        plain_init(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._start_allocation(reallocate)

    def _start_allocation(self, reallocate: bool) -> None:
        slots, device = self.in_channels, self.weight.device
        self.register_buffer("gate", torch.ones(slots, dtype=torch.bool, device=device))
        self.register_buffer("index", torch.arange(slots, device=device))
        self.register_buffer("moved", torch.zeros(slots, dtype=torch.bool, device=device))
        self.register_buffer("shifted", torch.zeros(slots, dtype=torch.bool, device=device))
        shift = nn.Parameter(self.weight.new_zeros(slots, self._num_axes)) if reallocate else None
        self.register_parameter("shift", shift)
        self.weight_std = None
        self._mean_source: MeanSource | None = None

    @classmethod
    def from_conv(
        cls, conv: nn.Module, *, reallocate: bool = True, mean: MeanSource | None = None
    ) -> Self:
        """Make a selective layer that holds the very weight and bias of a plain conv.

        Hooks, training flag and everything else that is set on `conv` are taken over.

        Args:
            conv: a plain torch conv of this layer's dimension.
            reallocate: as for the layer.
            mean: the layer's `mean_source`.

        Raises:
            TypeError: `conv` is of another type; subclasses may compute something else.

        Example:
            >>> import torch
            >>> conv = torch.nn.Conv2d(4, 8, 3)
            >>> SelectConv2d.from_conv(conv).weight is conv.weight
            True
        """
        if type(conv) is not cls._plain_type:
            wanted = f"torch.nn.{cls._plain_type.__name__}"
            raise TypeError(f"`conv` must be exactly a {wanted}, got {type(conv).__name__}.")
        if "weight" not in conv._parameters:
            raise TypeError("`conv` must own its weight, got one whose weight a hook recomputes.")
        if "forward" in vars(conv):
            raise TypeError("`conv` must compute as its type does, got one with a patched forward.")
        layer = cls.__new__(cls)
        # The dicts of hooks are shared, so that the handles that users hold still remove them.
        layer.__dict__.update(conv.__dict__)
        layer.__dict__.pop("_compiled_call_impl", None)  # conv.compile(): it would run the conv
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            layer.__dict__[own] = conv.__dict__[own].copy()
        layer._start_allocation(reallocate)
        layer.mean_source = mean
        return layer

    @property
    def mean_source(self) -> MeanSource | None:
        """Where E[X] comes from: a `BatchNormMean`, an `ObservedMean`, or None."""
        return self._mean_source

    @mean_source.setter
    def mean_source(self, source: MeanSource | None) -> None:
        if source is not None and not isinstance(source, MeanSource):
            raise TypeError(
                f"`mean_source` must be a BatchNormMean, an ObservedMean or None, got {source!r}."
            )
        if isinstance(source, MeanSource) and source.num_channels not in (None, self.in_channels):
            raise ValueError(
                f"`mean_source` describes {source.num_channels} channels, "
                f"the layer has {self.in_channels} inputs."
            )
        for name in ("observed_mean", "observed_var", "observed_batches"):
            self._buffers.pop(name, None)
        if isinstance(source, ObservedMean):
            zeros = self.weight.new_zeros(self.in_channels, dtype=torch.float32)
            self.register_buffer("observed_mean", zeros)
            self.register_buffer("observed_var", zeros.clone())
            batches = torch.zeros((), dtype=torch.int64, device=zeros.device)
            self.register_buffer("observed_batches", batches)
        self._mean_source = source

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mean_source":  # nn.Module would take in a module, past the property's checks
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve the rebuilt input; `input` itself is never written into."""
        if not self._is_input(input):
            return self._convolve(input, self.weight)  # refuses it, in torch's words
        if self.training and isinstance(self._mean_source, ObservedMean):
            self._observe(input)
        if not can_read(self.gate):
            # No look at the buffers' values: one graph serves every allocation.
            return self._convolve(self._reroute(input, self._rerouted()), self._open_weight())
        if triton_select.can_run(self._batched(input)):
            # Nor here, where a look would make the host wait for the GPU, layer by layer.
            return self._convolve(self._reroute(input, self._rerouted()), self._open_weight())
        any_closed, any_rerouted, any_shifted = self._read_allocation()
        if any_rerouted and kernels.can_run(self._batched(input)):
            if self._splits():
                return self._convolve_apart(input)
            return self._convolve_open(input, None, any_closed)
        if any_closed and self._gathers_open(input):
            return self._convolve_open(input, None, any_closed)
        weight = self._open_weight() if any_closed else self.weight
        if not any_shifted:
            weight = self._with_shift(weight)
        x = self._reroute(input, self._rerouted()) if any_rerouted else input
        return self._convolve(x, weight)

    def fuses(self, norm: nn.Module, x: Tensor) -> bool:
        """Tell whether `forward_norm_relu` can take `norm(x)` into its kernel.

        Not in a fresh layer, where it would save a little: that one computes exactly, to the last
        bit, what plain modules compute.
        """
        return (
            type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)
            and norm.weight is not None
            and norm.weight.dtype == torch.float32
            and norm.bias is not None
            and self._is_input(x)
            and x.ndim == self.weight.ndim
            and kernels.can_run(x)
            and x.numel() > x.shape[1]  # with one value a channel torch's batch norm refuses
            and not (self.training and isinstance(self._mean_source, ObservedMean))
            and not has_hooks(norm)
            and not has_hooks(self)
            and bool(self.gate.any())  # a conv needs an input
            and any(self._read_allocation())
        )

    def forward_norm_relu(self, x: Tensor, norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
        """Compute `self(relu(norm(x)))` with norm, ReLU and SelectChannel in one kernel.

        Closed slots are computed nowhere. Only where `fuses(norm, x)`.
        """
        return self._convolve_open(x, norm, self._read_allocation()[0])

    def select(self, x: Tensor) -> Tensor:
        """Rebuild an input (N, I, ...) as the conv sees it: SelectChannel of Section 2.2."""
        check_tensor("x", x, (None, self.in_channels, *[None] * self._num_axes))
        rebuilt = self._reroute(x, self._rerouted())
        # torch.where keeps the memory format; masked_fill makes its copy contiguous.
        return torch.where(self.gate.view(1, -1, *[1] * self._num_axes), rebuilt, 0.0)

    def input_mean(self) -> Tensor:
        """Compute E of each selected input channel, (I,); 0 where the slot is closed.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has seen nothing yet.
        """
        return self._input_moments()[0]

    def ecdm(self, normalized: bool = False, damage: str = "mean") -> Tensor:
        """Compute the damage of closing each slot, (I, O): Eq. (2) for "mean".

        Args:
            normalized: nECDM, the columns of which sum to 1.
            damage: "mean" (the paper), "rms", or "auto": mean where the input is known not to be
                negative, rms elsewhere.

        Returns:
            A matrix whose rows of closed slots are zero.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has seen nothing yet.
            ValueError: an unknown `damage`.
        """
        check_choice("damage", damage, DAMAGES)
        with torch.no_grad():
            # Closed slots have moments 0, and so rows of zeros.
            mean, var = self._input_moments(variance=self._uses_rms(damage))
            if var is None:
                matrix = ecdm(self.weight.detach(), mean, self.groups)
            else:
                matrix = rms_damage(self.weight.detach(), mean, var, self.groups)
            return normalize_ecdm(matrix) if normalized else matrix

    def smallest_gamma(self, damage: str = "auto") -> float | None:
        """Return the smallest gamma at which `dealloc` would close a slot now; None: at none."""
        can_close = self.gate.view(self.groups, -1).sum(dim=1, keepdim=True) > 1
        can_close = (can_close & self.gate.view(self.groups, -1)).flatten()
        if not bool(can_close.any()):
            return None
        return float(self.ecdm(normalized=True, damage=damage).amax(dim=1)[can_close].min())

    def dealloc(self, gamma: float = 1e-3, damage: str = "auto") -> Tensor:
        """Close the slots that Algorithm 1 chooses; a group's last open slot stays open.

        Args:
            gamma: the damage level, in [0, 1].
            damage: as for `ecdm`.

        Returns:
            The slots that were closed, int64.

        Raises:
            AllocationError: NaN or infinite weights or statistics; nothing was changed.
            MeanSourceError: there is no `mean_source`, or it has seen nothing yet.
            TypeError, ValueError: an argument that is not accepted.
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

        It knows no optimizer: where one holds momentum, use `ChannelAllocator`, which clears it.

        Args:
            top_k: K, how many slots are candidates as sources.
            max_copies: N_max; None: no cap.
            init: "zero" keeps the function; "random" is the ablation R^random.
            use_shift: False: copies without a shift, the ablation R^zero.
            max_shift: shifts are drawn from U[-max_shift, max_shift], in pixels.
            norm: norm of the scores: "l2", "linf".
            generator: a CPU generator; None: torch's global one.
            damage: as for `ecdm`.

        Returns:
            The slots that were re-opened, int64; empty where the layer does not re-allocate.

        Raises:
            AllocationError: NaN or infinite weights or statistics; nothing was changed.
            MeanSourceError: there is no `mean_source`, or it has seen nothing yet.
            TypeError, ValueError: an argument that is not accepted.
        """
        rule = ReallocRule(top_k, max_copies, init, use_shift, max_shift, norm)
        plan = self.plan(rule=rule, damage=damage, generator=generator)
        self.apply_plan(plan)
        return plan.opened

    def close(self, slots: Tensor | Sequence[int]) -> None:
        """Close these slots by hand; those that are closed already stay so.

        Raises:
            AllocationError: a slot that the layer does not have; nothing was changed.
            TypeError: slots that are not integers.
        """
        closed = torch.as_tensor(slots)
        if closed.numel() and (
            closed.is_floating_point() or closed.is_complex() or closed.dtype == torch.bool
        ):
            raise TypeError(f"`slots` must be integers, got {closed.dtype}.")
        self.apply_plan(LayerPlan(closed=closed.flatten().to("cpu", torch.int64)))

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
            gamma: the damage level of `dealloc`; None: close nothing but `closed`.
            rule: how to re-open; None, or a layer without `shift`: re-open nothing.
            damage: as for `ecdm`.
            protected: (I,) bool, slots that are not to be closed.
            closed: int64, open slots that are to be closed, in place of a `gamma`.
            generator: a CPU generator; None: torch's global one.

        Raises:
            AllocationError: NaN or infinite weights or statistics.
            MeanSourceError: there is no `mean_source`, or it has seen nothing yet.
        """
        check_choice("damage", damage, DAMAGES)
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
        opened, source = choose_sources(scores.cpu(), self.index.cpu(), gate.cpu(), rule, generator)
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

    def check_plan(self, plan: LayerPlan) -> None:
        """Check that a plan fits this layer and its present allocation.

        Raises:
            AllocationError: it names slots or channels that do not exist, or re-opens open ones.
        """
        for what, slots in (
            ("closed", plan.closed),
            ("opened", plan.opened),
            ("source", plan.source),
        ):
            if len(slots) == 0:
                continue
            low, high = torch.aminmax(slots)
            if int(low) < 0 or int(high) >= self.in_channels:
                outside = slots[(slots < 0) | (slots >= self.in_channels)].tolist()
                raise AllocationError(
                    f"`{what}` names {outside[:5]}; the layer has 0 to {self.in_channels - 1}."
                )
        if len(plan.source) != len(plan.opened):
            raise AllocationError(
                f"{len(plan.opened)} slots to re-open need as many sources, got {len(plan.source)}."
            )
        if len(plan.opened) == 0:
            return
        if len(plan.opened.unique()) != len(plan.opened):
            raise AllocationError(f"`opened` names a slot twice: {plan.opened.tolist()}.")
        if self.shift is None:
            raise AllocationError("the layer has reallocate=False: its slots cannot be re-opened.")
        if plan.shift is not None and tuple(plan.shift.shape) != (len(plan.opened), self._num_axes):
            raise AllocationError(
                f"shifts must have shape ({len(plan.opened)}, {self._num_axes}), "
                f"got {tuple(plan.shift.shape)}."
            )
        if plan.shift is not None and not bool(plan.shift.isfinite().all()):
            raise AllocationError("shifts must be finite, got NaN or infinite ones.")
        still_open = self.gate.cpu().index_fill(0, plan.closed, False)[plan.opened]
        if bool(still_open.any()):
            raise AllocationError(f"slots {plan.opened[still_open].tolist()[:5]} are open already.")

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
        weight = self.weight.new_zeros(()) if plan.weight_seed is None else self._draw_weight(plan)
        device = self.weight.device
        self.gate.index_fill_(0, plan.closed.to(device), False)
        if len(plan.opened) == 0 or self.shift is None:
            return
        opened = plan.opened.to(device)
        self.gate.index_fill_(0, opened, True)
        self.moved.index_fill_(0, opened, True)
        self.shifted.index_fill_(0, opened, plan.shift is not None)
        self.index.index_copy_(0, opened, plan.source.to(device))
        shift = self.shift.new_zeros(1) if plan.shift is None else plan.shift
        self.shift[opened] = shift.to(self.shift)
        slots_of(self.weight, self.groups)[self._group_and_slot(opened)] = weight.to(self.weight)

    def slot_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that hold something of each slot."""
        yield self.weight
        if self.shift is not None:
            yield self.shift

    def zero_slots(self, tensor: Tensor, slots: Tensor) -> None:
        """Zero in place what belongs to `slots` in a tensor laid out as a slot parameter."""
        slots = slots.to(tensor.device)
        if tensor.ndim <= 2:  # a row a slot; weights have at least three axes
            tensor[slots] = 0
        else:
            slots_of(tensor, self.groups)[self._group_and_slot(slots)] = 0

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

    def _uses_rms(self, damage: str) -> bool:
        if damage == "auto":
            return self._mean_source is not None and not self._mean_source.is_nonnegative
        return damage == "rms"

    def _input_moments(self, variance: bool = False) -> tuple[Tensor, Tensor | None]:
        source = self._mean_source
        if source is None:
            raise MeanSourceError(
                "the layer does not know its input's mean: set `mean_source` to a BatchNormMean or "
                "an ObservedMean, or let sc.convert do so."
            )
        if isinstance(source, ObservedMean):
            if int(self.observed_batches) == 0:
                raise MeanSourceError(
                    "the layer has not seen any input yet: run it in training mode first."
                )
            mean, var = self.observed_mean, self.observed_var if variance else None
        else:
            mean, var = source.mean(), source.var() if variance else None
        return self._by_slot(mean), None if var is None else self._by_slot(var)

    def _by_slot(self, moment: Tensor) -> Tensor:
        return self._take_moment(moment, self.index)

    def _take_moment(self, moment: Tensor, index: Tensor) -> Tensor:
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        moment = moment.to(self.weight.device, exact)
        return moment[index].masked_fill(~self.gate, 0.0)

    def _observe(self, x: Tensor) -> None:
        source = cast(ObservedMean, self._mean_source)
        batch = x if x.ndim == self.weight.ndim else x[None]
        source.observe(batch, self.observed_mean, self.observed_var, self.observed_batches)

    def _finite_necdm(self, damage: str) -> Tensor:
        necdm = self.ecdm(normalized=True, damage=damage)
        # One NaN or infinity spoils its whole column, so a look at a row's maximum finds it.
        if not bool(necdm.amax(dim=1).isfinite().all()):
            what = "weights" if bool(self.input_mean().isfinite().all()) else "input statistics"
            raise AllocationError(f"the layer's {what} hold NaN or infinite values.")
        return necdm

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

    def _is_input(self, x: Tensor) -> bool:
        """Tell whether `x` is (N, I, ...) or unbatched (I, ...)."""
        axes = self._num_axes
        return x.ndim in (axes + 1, axes + 2) and x.shape[-axes - 1] == self.in_channels

    def _rerouted(self) -> Tensor:
        own = torch.arange(self.in_channels, device=self.index.device)
        return self.gate & (self.shifted | (self.index != own))

    def _reroute(self, x: Tensor, rerouted: Tensor) -> Tensor:
        if x.ndim == self.weight.ndim - 1:  # an unbatched input, which convs accept
            return self._reroute(x[None], rerouted)[0]
        shifted = None if self.shift is None else self.shifted & rerouted
        run = triton_select.select if triton_select.can_run(x) else reroute
        return run(x, self.index, self.shift, shifted)

    def _open_weight(self) -> Tensor:
        """The weight with zeros where slots are closed: cheaper than zeros in the input."""
        by_group = self.gate.view(self.groups, 1, -1)
        shape = (self.groups, self.out_channels // self.groups, -1)
        is_open = by_group.expand(shape).reshape(self.out_channels, -1)
        return torch.where(is_open.view(*is_open.shape, *[1] * self._num_axes), self.weight, 0.0)

    def _with_shift(self, weight: Tensor) -> Tensor:
        """Tie the shift to the output where nothing is shifted.

        In training every parameter gets a gradient (here: zeros), or DDP would wait for it.
        """
        if not torch.is_grad_enabled() or self.shift is None:
            return weight
        never = torch.zeros((), dtype=torch.bool, device=weight.device)
        return torch.where(never, self.shift.sum(), weight)

    def _read_allocation(self) -> tuple[bool, bool, bool]:
        """Read whether any slot is closed, rerouted, shifted: in every forward, so not by torch."""
        buffers = [self.gate, self.shifted, self.index]
        if self.gate.device.type != "cpu":
            buffers = list(torch.stack([buffer.long() for buffer in buffers]).cpu())  # one transfer
        gate, shifted, index = (buffer.numpy() for buffer in buffers)
        gate, shifted = gate.astype(bool), (shifted & gate).astype(bool)
        rerouted = shifted | (gate & (index != np.arange(len(index))))
        return not gate.all(), bool(rerouted.any()), bool(shifted.any())

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.weight.ndim else x[None]

    def _gathers_open(self, x: Tensor) -> bool:
        """Tell whether copying the open channels costs less than convolving the closed ones."""
        if self.groups > 1 or not kernels.can_run(self._batched(x)):
            return False
        closed = self.in_channels - int(self.gate.sum())
        if closed == self.in_channels:
            return False  # a conv needs an input
        multiplies = self.weight[:, 0].numel() * closed
        return multiplies > _COPY_COST * (self.in_channels - closed)

    def _splits(self) -> bool:
        """Tell whether convolving the rerouted slots apart costs less than a copy of the input."""
        multiplies = self.weight[:, 0].numel() * int(self._rerouted().sum())
        return self.groups == 1 and multiplies < _COPY_COST * self.in_channels

    def _convolve_apart(self, x: Tensor) -> Tensor:
        """Convolve the input as it is, without a copy of it, and add the rerouted slots' part."""
        rerouted = self._rerouted()
        slots = rerouted.nonzero().flatten()
        keeps = (self.gate & ~rerouted).view(1, -1, *[1] * self._num_axes)
        own_weight = torch.where(keeps, self.weight, 0.0)
        batch = self._batched(x)
        batch, moved = kernels.tap(batch, rerouted, self.index, self.shift, self.shifted)
        if x.ndim != batch.ndim:
            batch, moved = batch[0], moved[0]
        forward = cast(Any, self)._conv_forward
        part: Tensor = forward(moved, self.weight.index_select(1, slots), None)
        return cast(Tensor, forward(batch, own_weight, self.bias).add_(part))

    def _convolve_open(
        self, x: Tensor, norm: nn.modules.batchnorm._BatchNorm | None, any_closed: bool
    ) -> Tensor:
        """Convolve in the kernels' way: what is closed is not there, in input and weight."""
        gate, weight = self.gate, self.weight
        if any_closed and self.groups == 1:
            weight = weight.index_select(1, gate.nonzero().flatten())
        elif any_closed:  # groups that differ in size are no conv
            gate, weight = torch.ones_like(gate), self._open_weight()
        allocation = (gate, self.index, self.shift, self.shifted)
        batch = self._batched(x)
        if norm is None:
            selected = kernels.select(batch, *allocation)
        else:
            selected = kernels.norm_relu_select(batch, norm, *allocation)
        return self._convolve(selected if x is batch else selected[0], weight)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, self)._conv_forward(x, weight, self.bias))

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


class SelectConv1d(SelectConvNd, nn.Conv1d):
    """`nn.Conv1d` with channel selectivity; `shift` is (I, 1). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv1d(8, 4, kernel_size=3)(torch.zeros(1, 8, 10)).shape
        torch.Size([1, 4, 8])
    """

    _plain_type = nn.Conv1d


class SelectConv2d(SelectConvNd, nn.Conv2d):
    """`nn.Conv2d` with channel selectivity (Section 2.2): same arguments, plus `reallocate`.

    A fresh layer computes exactly what the plain conv computes.

    Example:
        >>> import selectconv as sc, torch
        >>> bn = torch.nn.BatchNorm2d(8)
        >>> conv = SelectConv2d(8, 4, kernel_size=1)
        >>> conv.mean_source = sc.BatchNormMean(bn, torch.relu)
        >>> with torch.no_grad():
        ...     _ = conv.weight[:, 2:4].zero_()
        >>> conv.dealloc(gamma=1e-3)
        tensor([2, 3])
        >>> conv.realloc()
        tensor([2, 3])
        >>> int(conv.moved.sum()), bool(conv.gate.all())
        (2, True)
    """

    _plain_type = nn.Conv2d


class SelectConv3d(SelectConvNd, nn.Conv3d):
    """`nn.Conv3d` with channel selectivity; `shift` is (I, 3). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv3d(8, 4, kernel_size=1)(torch.zeros(1, 8, 2, 3, 4)).shape
        torch.Size([1, 4, 2, 3, 4])
    """

    _plain_type = nn.Conv3d


def draw_shift(
    count: int, axes: int, max_shift: float, generator: torch.Generator | None
) -> Tensor:
    """Draw shifts uniformly from [-max_shift, max_shift] pixels along each axis."""
    return (torch.rand(count, axes, generator=generator, device="cpu") * 2 - 1) * max_shift


def has_hooks(module: nn.Module) -> bool:
    """Tell whether someone watches or changes what goes in or out of a module."""
    every = nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


def slots_of(tensor: Tensor, groups: int) -> Tensor:
    """View (O, I / groups, ...), a weight's layout, as (groups, O / groups, I / groups, ...)."""
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])
