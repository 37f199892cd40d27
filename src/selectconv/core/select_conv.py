"""Section 2.2: the selective convolutional layer, in one, two and three dimensions.

`SelectConv(X; W) = Conv(SelectChannel(X); W)`. The allocation lives in four buffers and the `shift`
parameter, and nowhere else, so loading, moving, copying or broadcasting them is all it takes to
move an allocation. (Forward passes keep a summary of them, `paths.SlotSummary`.)
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from selectconv.checks import check_choice, check_flag, check_fraction
from selectconv.core.allocation import (
    ReallocRule,
    choose_closed,
    plan_reopening,
    smallest_gamma,
)
from selectconv.core.ecdm import expected_damage, normalize_ecdm
from selectconv.core.mean_source import ClosedForm, MeanSource, ObservedMean
from selectconv.core.paths import is_input, prepare, reroute_slots
from selectconv.core.plan import LayerPlan, as_slots
from selectconv.core.shift import mask_channels
from selectconv.core.shift_decay import watch_optimizers
from selectconv.core.slots import (
    SlottedConv,
    complete_state,
    draw_weights,
    fresh_slots,
    is_patched,
    living_layers,
    new_family,
    torch_conv,
    write_slots,
)
from selectconv.core.tensors import check_tensor
from selectconv.errors import AllocationError, BadType, BadValue, MeanSourceError

DAMAGES = ("auto", "mean", "rms")


class SelectConvNd(SlottedConv):
    """What the three selective convolutions share; use `SelectConv1d`, `-2d` or `-3d`.

    The arguments are those of torch's convs, plus `reallocate`. With `reallocate=False` the layer
    has no `shift`: it can close slots, but not re-open them. With `groups`, a slot may read a
    channel of any group.

    Its buffers and parameters are those of `SlottedConv`.
    """

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

    @classmethod
    def from_conv(
        cls, conv: nn.Module, *, reallocate: bool = True, mean: MeanSource | None = None
    ) -> Self:
        """Make a selective layer that shares the weight and the bias of a plain conv.

        Hooks, training flag and all other attributes of `conv` are kept.

        Args:
            conv: a torch conv of this layer's dimension, or of a subclass with torch's forward.
            reallocate: as for the layer.
            mean: the layer's `mean_source`.

        Raises:
            TypeError: `conv` may compute something else.
            TypeError, ValueError: `mean` is not a mean source that fits the layer.
        """
        plain = next(base for base in cls.__mro__ if base in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        wanted = f"torch.nn.{plain.__name__}"
        if torch_conv(conv) is not plain:
            raise BadType(f"`conv` must compute what {wanted} does, got {type(conv).__name__}.")
        if not {"weight", "bias"} <= set(conv._parameters) or is_patched(conv):
            raise BadType(f"`conv` must be a {wanted} with a weight and a forward of its own.")
        layer = cls.__new__(cls)
        # The dicts of hooks are shared, so that the handles that users hold still remove them.
        layer.__dict__.update(conv.__dict__)
        layer.__dict__.pop("_compiled_call_impl", None)  # conv.compile(): it would run the conv
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            layer.__dict__[own] = conv.__dict__[own].copy()
        layer._start_allocation(reallocate)
        layer.mean_source = mean
        return layer

    def _start_allocation(self, reallocate: bool) -> None:
        check_flag("reallocate", reallocate)
        for name, value in fresh_slots(self.in_channels, self.weight.device).items():
            self.register_buffer(name, value)
        shift = None
        if reallocate:  # frozen if the weight is
            offsets = self.weight.new_zeros(self.in_channels, len(self.kernel_size))
            shift = nn.Parameter(offsets, requires_grad=self.weight.requires_grad)
        self.register_parameter("shift", shift)
        self.family, self.num_loads = new_family(), 0
        self._begin_life()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        """Load the layer; the state of a plain conv means a fresh allocation."""
        complete_state(self, state, prefix)
        cast(Any, super())._load_from_state_dict(state, prefix, *args)
        self.num_loads += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, super()).__setstate__(state)
        self._begin_life()

    def _begin_life(self) -> None:
        living_layers.add(self)
        watch_optimizers()

    def extra_repr(self) -> str:
        """Add the allocation to what a plain conv shows."""
        plain = str(cast(Any, super()).extra_repr())
        if self.gate.is_meta:
            return plain
        moved = int((self.moved & self.gate).sum())
        return f"{plain}, open={int(self.gate.sum())}, moved={moved}"

    # What the layer computes.

    def forward(self, input: Tensor) -> Tensor:
        """Convolve the selected input; `input` itself is never written into."""
        if not is_input(self, input):
            return self._conv_forward(input, self.weight, self.bias)  # raises torch's own error
        x = input if input.ndim == self.weight.ndim else input[None]  # convs take unbatched inputs
        if self.training and isinstance(self.mean_source, ObservedMean):
            buffers = (self.observed_mean, self.observed_var, self.observed_batches)
            self.mean_source.observe(x, *buffers)
        out = self._conv_forward(*prepare(self, x), self.bias)
        return out if x is input else out[0]

    def select(self, x: Tensor) -> Tensor:
        """Select from an input (N, I, ...) what the conv reads: SelectChannel of Section 2.2."""
        check_tensor("x", x, (None, self.in_channels, *[None] * len(self.kernel_size)))
        return mask_channels(reroute_slots(self, x, None), self.gate)

    # What closing a slot would do (Section 2.1).

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a `mean_source` is checked, and what it observes gets its buffers."""
        if name != "mean_source":
            super().__setattr__(name, value)
            return
        if not isinstance(value, ClosedForm | ObservedMean | None):
            raise BadType(
                f"`mean_source` must be a BatchNormMean, an ObservedMean or None, got {value!r}."
            )
        if value is not None and value.num_channels not in (None, self.in_channels):
            raise BadValue(
                f"`mean_source` must describe {self.in_channels} channels, "
                f"got {value.num_channels}."
            )
        for observed in ("observed_mean", "observed_var", "observed_batches"):
            self._buffers.pop(observed, None)
        if isinstance(value, ObservedMean):
            zeros = self.weight.new_zeros(self.in_channels, dtype=torch.float32)
            self.register_buffer("observed_mean", zeros)
            self.register_buffer("observed_var", zeros.clone())
            self.register_buffer("observed_batches", zeros.new_zeros((), dtype=torch.int64))
        self.__dict__[name] = value

    def knows_mean(self) -> bool:
        """Return whether `input_mean` has an answer yet."""
        if isinstance(self.mean_source, ObservedMean):
            return int(self.observed_batches) > 0
        return self.mean_source is not None

    def input_mean(self) -> Tensor:
        """Compute E[X] of each selected input channel, (I,); 0 for closed slots.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
        """
        return self._input_moment("mean")

    def _input_moment(self, name: str) -> Tensor:
        """Compute "mean" or "var" of each selected input channel, (I,); 0 for closed slots."""
        source = self.mean_source
        if not self.knows_mean():
            raise MeanSourceError(
                "the layer does not know its input's mean: set `mean_source` to a BatchNormMean or "
                "an ObservedMean, or let sc.convert do so."
                if source is None
                else "the layer has not seen any input yet: run it in training mode first."
            )
        is_closed = isinstance(source, ClosedForm)
        moment: Tensor = getattr(source, name)() if is_closed else getattr(self, f"observed_{name}")
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        return moment.to(self.weight.device, exact)[self.index].masked_fill(~self.gate, 0.0)

    @torch.no_grad()
    def ecdm(self, normalized: bool = False, damage: str = "mean") -> Tensor:
        """Compute the damage of closing each slot, (I, O): Eq. (2) for "mean".

        Args:
            normalized: True returns nECDM, whose columns sum to 1.
            damage: "mean" (the paper), "rms", or "auto": mean if the input is known never to be
                negative, otherwise rms.

        Returns:
            The matrix. Rows of closed slots are zero.

        Raises:
            MeanSourceError: there is no `mean_source`, or it has not seen any input yet.
            ValueError: `damage` is unknown.
        """
        check_choice("damage", damage, DAMAGES)
        is_signed = self.mean_source is not None and not self.mean_source.is_nonnegative
        matrix = expected_damage(
            self.weight.detach(), self._input_moment, damage, is_signed, self.groups
        )
        return normalize_ecdm(matrix) if normalized else matrix

    def smallest_gamma(self) -> float | None:
        """Return the smallest gamma at which `dealloc` would close a contributing slot, or None."""
        return smallest_gamma(self.ecdm(normalized=True, damage="auto"), self.gate, self.groups)

    # Section 2.3: closing and re-opening slots.

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
            AllocationError, MeanSourceError, TypeError, ValueError: as for `dealloc`.
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
        self.apply_plan(LayerPlan(closed=as_slots(slots, self.in_channels)))

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
        if generator is not None and (
            not isinstance(generator, torch.Generator) or generator.device.type != "cpu"
        ):
            raise BadType(f"`generator` must be a torch.Generator of the CPU, got {generator!r}.")
        if self.shift is None:
            rule = None
        if closed is None and gamma is None and rule is None:
            return LayerPlan()
        necdm = self.ecdm(normalized=True, damage=damage)
        # One NaN or infinity spoils its whole column, so a look at the first row finds it.
        if not bool(necdm[0].isfinite().all()):
            what = "weights" if bool(self.input_mean().isfinite().all()) else "input statistics"
            raise AllocationError(f"the layer's {what} hold NaN or infinite values.")
        if gamma is not None:
            closed = choose_closed(necdm, self.gate, self.groups, gamma, protected)
        closed = (self.index[:0] if closed is None else closed).to(self.gate.device)
        gate = self.gate.index_fill(0, closed, False)
        if rule is None or bool(gate.all()):
            return LayerPlan(closed=closed.cpu())
        necdm = normalize_ecdm(necdm.index_fill_(0, closed, 0.0))
        offset = torch.where(self.shifted[:, None], cast(Tensor, self.shift), 0.0)
        reopening = plan_reopening(necdm, self.index, gate, offset, rule, generator)
        return replace(reopening, closed=closed.cpu())

    def check_owns_weight(self) -> None:
        """Check that the weight is a parameter: a recomputed weight would not keep a change.

        Raises:
            AllocationError: a hook or a parametrization recomputes it.
        """
        if "weight" not in self._parameters:
            raise AllocationError(
                "a hook or a parametrization (prune, weight_norm, spectral_norm) recomputes the "
                "weight, so slots cannot be re-allocated: remove it, such as with "
                "torch.nn.utils.prune.remove(layer, 'weight')."
            )

    def apply_plan(self, plan: LayerPlan) -> None:
        """Check a plan, then carry it out.

        Raises:
            AllocationError: the plan does not fit the layer and its present allocation, or the
                weight is recomputed. Nothing was changed.
        """
        self.check_owns_weight()
        plan.check(self.gate.cpu(), len(self.kernel_size), can_open=self.shift is not None)
        self.carry_out(plan)

    @torch.no_grad()
    def carry_out(self, plan: LayerPlan) -> None:
        """Close, then re-open with weights and shifts of their own, as a plan that fits says."""
        weight, opened = self.weight, plan.opened.to(self.weight.device)
        self.gate.index_fill_(0, plan.closed.to(weight.device), False)
        if self.shift is None or len(opened) == 0:
            return
        self.gate.index_fill_(0, opened, True)
        self.moved.index_fill_(0, opened, True)
        self.shifted.index_fill_(0, opened, plan.shift is not None)
        self.index.index_copy_(0, opened, plan.source.to(weight.device))
        self.shift[opened] = 0.0 if plan.shift is None else plan.shift.to(self.shift)
        seed = plan.weight_seed
        drawn = None if seed is None else draw_weights(self, len(opened), seed)
        write_slots(weight, self.groups, opened, drawn)
