"""Section 2.3: Algorithms 1 and 2 as pure functions."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from selectconv.checks import check_choice, check_count, check_fraction, check_non_negative
from selectconv.core.plan import LayerPlan
from selectconv.core.tensors import check_tensor
from selectconv.errors import BadValue

NORMS = ("l2", "linf")
INITS = ("zero", "random")


def choose_dealloc(necdm: Tensor, gamma: float) -> Tensor:
    """Choose the slots to close (Algorithm 1).

    Slots are taken in the order of their largest entry `max_j nECDM[i, j]`, the lower index first
    if two are equal, as long as no entry of the sum of their rows exceeds `gamma`.

    Args:
        necdm: (I, O), not negative.
        gamma: the largest share of any output that may be removed, in [0, 1].

    Returns:
        The chosen slots, sorted, int64; all of them if all fit.

    Raises:
        TypeError, ValueError: `necdm` is not a floating matrix, or `gamma` is outside [0, 1].

    Example:
        >>> import torch
        >>> choose_dealloc(torch.tensor([[0.7, 0.2], [0.1, 0.1], [0.2, 0.7]]), gamma=0.25)
        tensor([1])
    """
    # Differs from paper: Algorithm 1 prints "until ... <= gamma", which would close nothing as soon
    # as one weak slot exists; its text, its optimisation problem and the authors' code all mean
    # "while the sum stays within gamma". Decision 1 in docs/method.md.
    check_tensor("necdm", necdm, (None, None))
    gamma = check_fraction("gamma", gamma)
    if necdm.shape[1] == 0:
        return torch.arange(necdm.shape[0], device=necdm.device)
    largest = necdm.amax(dim=1)
    light = (largest <= gamma).nonzero().flatten()  # a slot that does not fit alone never fits
    order = light[largest[light].sort(stable=True).indices]
    # Transposed, since a conv's weight lies in memory by outputs; on the CPU, since torch refuses
    # cumsum on CUDA where deterministic algorithms are asked for.
    inside = necdm.t().index_select(1, order).cpu().cumsum(dim=1).amax(dim=0) <= gamma
    return order[: int(inside.sum())].sort().values


def choose_closed(
    necdm: Tensor, gate: Tensor, groups: int, gamma: float, protected: Tensor | None = None
) -> Tensor:
    """Choose the open slots of a layer to close: Algorithm 1, but never a group's last open slot.

    Args:
        necdm: (I, O).
        gate: (I,) bool, the open slots.
        groups: of the conv.
        gamma: as for `choose_dealloc`.
        protected: (I,) bool, slots that must stay open.
    """
    if protected is None:
        chosen = choose_dealloc(necdm, gamma)
    else:
        free = (~protected.to(necdm.device)).nonzero().flatten()
        chosen = free[choose_dealloc(necdm[free], gamma)]
    chosen = chosen[gate[chosen]]  # closed slots have zero rows: they always fit
    is_chosen = torch.zeros_like(gate).index_fill_(0, chosen, True)
    # The slot that Algorithm 1 would take last stays.
    is_spent = ~(gate & ~is_chosen).view(groups, -1).any(dim=1)
    is_spent &= is_chosen.view(groups, -1).any(dim=1)
    if bool(is_spent.any()):
        size = necdm.amax(dim=1).masked_fill(~is_chosen, -1.0).view(groups, -1)
        last = size.shape[1] - 1 - size.flip(1).argmax(dim=1)  # the highest index among equals
        is_chosen.view(groups, -1)[is_spent, last[is_spent]] = False
    return is_chosen.nonzero().flatten()


def smallest_gamma(necdm: Tensor, gate: Tensor, groups: int) -> float | None:
    """Return the smallest gamma at which `choose_closed` closes a slot that contributes.

    Slots without any damage, such as those that were just re-opened with weights of zero, do not
    count: every gamma closes them. Returns None if there is no other slot to close.
    """
    by_group = gate.view(groups, -1)
    can_close = (by_group & (by_group.sum(dim=1, keepdim=True) > 1)).flatten()
    largest = necdm.amax(dim=1)
    largest = largest[can_close & (largest > 0)]
    return float(largest.min()) if len(largest) else None


def realloc_scores(
    necdm: Tensor,
    index: Tensor,
    gate: Tensor | None = None,
    max_copies: int | None = None,
    norm: str = "l2",
) -> Tensor:
    """Score the slots as sources of re-allocation (Algorithm 2's s).

    Args:
        necdm: (I, O).
        index: (I,) int64, the channel that each slot reads.
        gate: (I,) bool, the open slots. None: all slots are open.
        max_copies: N_max: slots whose channel is read by more open slots than this score 0. None:
            no limit.
        norm: "l2", or "linf" as in the paper's footnote.

    Returns:
        (I,), the norm of each row; 0 if the slot is closed or its channel is read too often.

    Raises:
        TypeError, ValueError: a shape, dtype, `max_copies` or `norm` is not accepted.

    Example:
        >>> import torch
        >>> necdm = torch.tensor([[0.3, 0.4], [0.7, 0.6]])
        >>> realloc_scores(necdm, torch.tensor([0, 1]), gate=torch.tensor([True, False]))
        tensor([0.5000, 0.0000])
    """
    check_tensor("necdm", necdm, (None, None))
    slots = necdm.shape[0]
    check_tensor("index", index, (slots,), torch.int64, match="necdm")
    check_choice("norm", norm, NORMS)
    is_open = torch.ones_like(index, dtype=torch.bool) if gate is None else gate
    check_tensor("gate", is_open, (slots,), torch.bool, match="necdm")
    if bool(((index < 0) | (index >= slots)).any()):
        low, high = (int(bound) for bound in torch.aminmax(index))
        raise BadValue(f"`index` must name channels 0 to {slots - 1}, got {low} to {high}.")
    # torch.linalg.vector_norm is several times slower on rows.
    scores = necdm.square().sum(dim=1).sqrt() if norm == "l2" else necdm.abs().amax(dim=1)
    scores = scores.masked_fill(~is_open, 0.0)
    if max_copies is not None:
        max_copies = check_count("max_copies", max_copies, 1)
        scores = scores.masked_fill(_count_readers(index, is_open)[index] > max_copies, 0.0)
    return scores


@dataclass(frozen=True)
class ReallocRule:
    """How closed slots are re-opened: Algorithm 2's constants and the ablations of Section 3.3.

    Attributes:
        top_k: K, how many slots are candidates as sources.
        max_copies: N_max; None: no cap.
        init: weights of re-opened slots: "zero", or "random" as in R^random.
        use_shift: False leaves out the spatial shift, as in R^zero and R^random.
        max_shift: shifts are drawn from U[-max_shift, max_shift], in pixels.
        norm: norm of the scores.
        is_whole: shifts are distinct whole pixels around the source instead (`draw_offsets`).
    """

    top_k: int = 3
    max_copies: int | None = 32
    init: str = "zero"
    use_shift: bool = True
    max_shift: float = 1.5
    norm: str = "l2"
    is_whole: bool = False

    def __post_init__(self) -> None:
        check_choice("init", self.init, INITS)
        check_choice("norm", self.norm, NORMS)
        cap = None if self.max_copies is None else check_count("max_copies", self.max_copies, 1)
        vars(self).update(  # frozen; numbers of NumPy and torch become Python's
            top_k=check_count("top_k", self.top_k, 1),
            max_copies=cap,
            max_shift=check_non_negative("max_shift", self.max_shift),
        )


def choose_sources(
    scores: Tensor,
    index: Tensor,
    gate: Tensor,
    rule: ReallocRule,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose which closed slots to re-open and the channel each is to read (Algorithm 2).

    Each closed slot, in order, draws uniformly from C, the `top_k` slots of the highest scores
    above 0, and reads what the drawn slot reads. With a cap, a channel that more than `max_copies`
    open slots read leaves C for the rest of the call; once C is empty, slots stay closed.

    Args:
        scores: (I,), from `realloc_scores`; like `index` and `gate`, on the CPU.
        index: the channel that each slot reads.
        gate: the open slots.
        rule: Algorithm 2's constants.
        generator: a CPU generator; None: torch's global one.

    Returns:
        The slots to re-open, in ascending order, and the channels they are to read.
    """
    free = (~gate).nonzero().flatten()
    best = scores.sort(descending=True, stable=True).indices[: rule.top_k]
    channels = index[best[scores[best] > 0]]  # pi_c of the candidates: copies never chain
    if rule.max_copies is None and len(channels):
        return free, channels[_draw(len(channels), len(free), generator)]
    cap = len(index) if rule.max_copies is None else rule.max_copies
    # Differs from paper: the cap is tested at each assignment, not once a call.
    # Decision 3 in docs/method.md.
    readers = _count_readers(index, gate)
    chosen: list[Tensor] = []
    left = len(free)
    while left > 0 and len(channels) > 0:
        # Draw for all that are left; keep the draws up to the one that fills a channel.
        drawn = channels[_draw(len(channels), left, generator)]
        names = channels.unique()
        room = cap + 1 - readers[names]
        taken = (drawn[:, None] == names).cumsum(dim=0)  # (left, distinct channels)
        full = (taken >= room).any(dim=1).nonzero().flatten()
        kept = drawn if len(full) == 0 else drawn[: int(full[0]) + 1]
        chosen.append(kept)
        left -= len(kept)
        readers = readers + torch.bincount(kept, minlength=len(readers))
        channels = channels[readers[channels] <= cap]
    source = torch.cat(chosen) if chosen else channels[:0]
    return free[: len(source)], source


def _draw(high: int, count: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(high, (count,), generator=generator, device="cpu")


def plan_reopening(
    necdm: Tensor,
    index: Tensor,
    gate: Tensor,
    offset: Tensor,
    rule: ReallocRule,
    generator: torch.Generator | None = None,
) -> LayerPlan:
    """Plan what the closed slots are to read, at which shift, and with which weights.

    Args:
        necdm: (I, O), of the slots that stay open.
        index: the channel that each slot reads.
        gate: the open slots.
        offset: (I, spatial axes), the shift of each slot; 0 where none applies.
        rule: Algorithm 2's constants.
        generator: a CPU generator; None: torch's global one.
    """
    scores = realloc_scores(necdm, index, gate, rule.max_copies, rule.norm).cpu()
    opened, source = choose_sources(scores, index.cpu(), gate.cpu(), rule, generator)
    if rule.is_whole:
        taken = offset[gate].cpu()
        shift = draw_offsets(source, index[gate].cpu(), taken, generator)
    else:
        shift = draw_shift(len(opened), offset.shape[1], rule.max_shift, generator)
    seed = None
    if rule.init == "random":
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    return LayerPlan(
        opened=opened, source=source, shift=shift if rule.use_shift else None, weight_seed=seed
    )


def draw_shift(
    count: int, axes: int, max_shift: float, generator: torch.Generator | None
) -> Tensor:
    """Draw shifts uniformly from [-max_shift, max_shift] pixels along each axis."""
    return (torch.rand(count, axes, generator=generator, device="cpu") * 2 - 1) * max_shift


def draw_offsets(
    source: Tensor, index: Tensor, taken: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw whole-pixel shifts such that no two slots read the same channel at the same offset.

    Each slot, in order, draws from the nearest offsets that are free: the 8 neighbours of a pixel
    (on maps), then the ring of 16 around these, and so on. Zero, the channel itself, is never free.

    Args:
        source: (B,), the channels that the slots are to read.
        index: (A,), the channels that open slots read.
        taken: (A, axes), their shifts.
        generator: a CPU generator; None: torch's global one.
    """
    used = defaultdict(set)
    for channel, offset in zip(index.tolist(), taken.tolist(), strict=True):
        used[channel].add(tuple(offset))
    drawn = taken.new_zeros(len(source), taken.shape[1])
    for row, channel in enumerate(source.tolist()):
        reach = 0
        free: list[tuple[int, ...]] = []
        while not free:
            reach += 1
            square = product(range(-reach, reach + 1), repeat=taken.shape[1])
            ring = [offset for offset in square if max(map(abs, offset)) == reach]
            free = [offset for offset in ring if offset not in used[channel]]
        chosen = free[int(_draw(len(free), 1, generator))]
        used[channel].add(chosen)
        drawn[row] = torch.tensor(chosen)
    return drawn


def _count_readers(index: Tensor, gate: Tensor) -> Tensor:
    """Count, for each channel, the open slots that read it (Algorithm 2's N)."""
    return torch.zeros_like(index).index_add_(0, index, gate.to(index.dtype))
