"""The gradients that slots would get if they existed, gathered in ordinary training steps.

A re-opened slot has weights of zero, so the gradient that they would get is known before the slot
exists. For an output's gradient G and a copy of channel c at offset r, a 1x1 conv's is

    a[o, c, r] = sum over images and pixels y of G[o, y] * X[c, y + r]

and a larger kernel's has one such sum for each of its positions. Some forward passes are watched;
their backward passes add to the sums, from some of their images and pixels. Watching does
not change what training computes.

Dimensions, in shapes and einsums:

    N  images of a pass            p  pixels of the output that were drawn
    c  channels of the input       t  positions of the kernel
    F  offsets of the candidates   k  outputs of all groups, or combinations of them if many

A group's *rows* are its k / groups outputs times the t positions: a row for each weight of a slot.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selectconv.core import kernels
from selectconv.core.conv_geometry import draw_pixels, number_pixels, read_places
from selectconv.core.damage import DamageConvNd
from selectconv.core.shift import reroute

LAGS = 4
"""How far, in pixels to each side, covariances are kept: two slots may differ by that much."""

PASSES = 32
"""Passes that are watched in an epoch."""

_REACH = 1  # whole pixels to each side; the paper draws shifts of up to 1.5
_FIRST_EVERY = 10  # every tenth pass is watched, until the length of an epoch is known
_IMAGES = 64  # of a pass
_PIXELS = 16  # of an image, times positions of the kernel: neighbours say much the same
_ROWS = 32  # of a group; if it has more, combinations of its outputs are kept
_COVARIANCE = (4, 8)  # passes of an epoch, and images of each, for the covariances


@dataclass
class Schedule:
    """Which forward passes of a layer are watched: about `PASSES` in an epoch.

    Attributes:
        phase: layers with different phases are watched in different passes.
        every: one pass in `every` is watched.
        forwards: the passes since `restart`.
        is_over: watching has ended.
    """

    phase: int = 0
    every: int = _FIRST_EVERY
    forwards: int = 0
    is_over: bool = False

    def is_due(self) -> bool:
        """Count a forward pass; return whether it is to be watched."""
        is_due = (self.forwards + self.phase) % self.every == 0
        self.forwards += 1
        return is_due and not self.is_over

    def restart(self) -> None:
        """Begin an epoch, which is taken to be as long as the last."""
        self.every = max(1, self.forwards // PASSES)
        self.forwards = 0


class _Sample(NamedTuple):
    """What a watched forward pass leaves for its backward pass.

    Attributes:
        pixels: (p,), the numbers of the drawn pixels.
        candidates: (N, t, p, F * c), what candidates would read there.
        slots: the slots that read anything but their own channel.
        moved: (N, t, p, slots), what these read; None without any.
        mean, covariance: of the channels, summed over `images`; None: enough are known.
        images: how many.
    """

    pixels: Tensor
    candidates: Tensor
    slots: Tensor
    moved: Tensor | None
    mean: Tensor | None
    covariance: Tensor | None
    images: Tensor


class GradientStatistics:
    """Sums over the watched passes of one layer.

    Even and odd images are kept apart, for an energy without bias: the product of two independent
    noisy sums is right in the mean, the square of one is not.

    Args:
        layer: the layer; its `forward` reports here.
        use_shift: candidates are copies at every whole offset of up to a pixel; else at 0 alone.
        phase: as for `Schedule`.

    Attributes:
        offsets: (F, axes) float64, the candidates' offsets.
        schedule: which passes are watched.
        passes: how many passes were watched since `restart`.
        sums: by name; `candidates` (2, groups, rows, c, F), `slots` (2, groups, rows, slots)
            of those that read anything but their own channel, `outputs` (2, groups, rows),
            `mean` (c,) and `covariance` (c, lags...), summed over `images`.
    """

    def __init__(self, layer: DamageConvNd, *, use_shift: bool = True, phase: int = 0) -> None:
        self.layer = layer
        axes = len(layer.kernel_size)
        reach = range(-_REACH, _REACH + 1) if use_shift else range(1)
        offsets = list(itertools.product(reach, repeat=axes))
        self.offsets = torch.tensor(offsets, dtype=torch.float64, device="cpu")
        self.schedule = Schedule(phase)
        self.passes = 0
        self.sums: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model is not watched."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle as None: a saved model is not watched either."""
        return type(None), ()

    def restart(self) -> None:
        """Begin an epoch."""
        self.schedule.restart()
        self.forget()

    def forget(self) -> None:
        """Forget the sums."""
        self.passes = 0
        self.sums = {}

    def see(self, read: Callable[[], Tensor], out: Tensor) -> None:
        """Count a forward pass in training; if its turn has come, watch its backward pass.

        Args:
            read: returns the layer's input (N, c, ...); called only for a pass that is watched.
            out: the layer's output.
        """
        if out.requires_grad and self.schedule.is_due():
            sample = self._sample(read().detach()[:_IMAGES], out.shape[2:])
            out.register_hook(lambda grad: self._add(sample, grad.detach()[:_IMAGES]))

    @torch.no_grad()
    def _sample(self, x: Tensor, size: Sequence[int]) -> _Sample:
        """Take what the sums need from an input (N, c, ...), so that it need not be kept."""
        layer: Any = self.layer
        # Indices are computed on the CPU, whatever torch's default device is.
        with torch.autocast(x.device.type, enabled=False), torch.device("cpu"):
            x = x.float()
            wanted = max(4, _PIXELS // math.prod(layer.kernel_size))
            pixels = draw_pixels(size, wanted, seed=self.passes)  # other ones in each pass
            slots = layer.rerouted().nonzero().flatten()
            moved = None
            if len(slots):
                shift = None if layer.shift is None else layer.shift.detach()[slots]
                kernel = kernels.find_kernel(x)
                run = reroute if kernel is None else kernel.reroute
                copies = run(x, layer.index[slots], shift, layer.shifted[slots])
                moved = _read(copies, layer, pixels, torch.zeros_like(self.offsets[:1]).long())
            passes, images = _COVARIANCE
            some = x[:images]
            has_enough = self.passes >= passes
            return _Sample(
                pixels=number_pixels(pixels, size).to(x.device),
                candidates=_read(x, layer, pixels, self.offsets.long()),
                slots=slots,
                moved=moved,
                mean=None if has_enough else some.mean(dim=(0, *range(2, x.ndim))) * len(some),
                covariance=None if has_enough else autocovariance(some) * len(some),
                images=torch.tensor(float(len(some))),
            )

    @torch.no_grad()
    def _add(self, sample: _Sample, grad: Tensor) -> None:
        """Add a pass, with the gradients (N, O, ...) of the layer's output."""
        layer = self.layer
        with torch.autocast(grad.device.type, enabled=False):
            taken = grad.flatten(2).index_select(2, sample.pixels).float()
            # Not finite: a loss scale that was too high. The optimizer skips the step as well.
            if not bool(taken.isfinite().all()):
                return
            taken = self._sketch(taken)  # N, k, p
            candidates = self._sum(taken, sample.candidates, len(self.offsets))
            slots = taken.new_zeros(*candidates.shape[:3], layer.in_channels)
            if sample.moved is not None:
                slots.index_copy_(3, sample.slots, self._sum(taken, sample.moved, 1)[..., 0])
            positions = math.prod(layer.kernel_size)
            outputs = torch.stack([taken[half].sum(dim=(0, 2)) for half in self._halves()])
            outputs = outputs.view(2, layer.groups, -1).repeat_interleave(positions, dim=2)
            for name, value in (("candidates", candidates), ("slots", slots), ("outputs", outputs)):
                self._accumulate(name, value)
            if sample.mean is not None and sample.covariance is not None:
                self._accumulate("images", sample.images)
                self._accumulate("mean", sample.mean)
                self._accumulate("covariance", sample.covariance)
        self.passes += 1

    def _accumulate(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _halves(self) -> tuple[slice, slice]:
        """Return the even and the odd images; a batch of one alternates from pass to pass."""
        return slice(self.passes % 2, None, 2), slice(1 - self.passes % 2, None, 2)

    def _sketch(self, grad: Tensor) -> Tensor:
        """Weight the outputs (N, O, p); if a group has many, keep random combinations: (N, k, p).

        Random signs keep inner products in the mean.
        """
        layer = self.layer
        # A batch norm that follows makes the layer blind to an output's scale, hence |W_o|.
        grad = grad * layer.weight.detach().float().flatten(1).norm(dim=1)[:, None]
        outputs = layer.out_channels // layer.groups
        kept = max(1, _ROWS // math.prod(layer.kernel_size))
        if outputs <= kept:
            return grad
        generator = torch.Generator().manual_seed(outputs)
        drawn = torch.randint(2, (outputs, kept), generator=generator, device="cpu")
        signs = ((drawn * 2 - 1) / math.sqrt(kept)).to(grad)
        by_group = grad.unflatten(1, (layer.groups, outputs))
        return torch.einsum("ngop,os->ngsp", by_group, signs).flatten(1, 2)

    def _sum(self, grad: Tensor, read: Tensor, num_offsets: int) -> Tensor:
        """Compute the gradients of weights that would read what `_read` returned.

        Returns:
            (2, groups, rows, c, F).
        """
        sums = [
            torch.einsum("nkp,ntpz->tkz", grad[half], read[half]).unflatten(2, (num_offsets, -1))
            for half in self._halves()
        ]
        both: Tensor = torch.stack(sums).unflatten(2, (self.layer.groups, -1))
        return both.permute(0, 2, 3, 1, 5, 4).flatten(2, 3)  # from 2, t, groups, k / groups, F, c

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums."""
        layer = self.layer
        positions, axes = math.prod(layer.kernel_size), len(layer.kernel_size)
        outputs = min(layer.out_channels // layer.groups, max(1, _ROWS // positions))
        rows = (2, layer.groups, outputs * positions)
        return {
            "candidates": (*rows, layer.in_channels, len(self.offsets)),
            "slots": (*rows, layer.in_channels),
            "outputs": rows,
            "images": (),
            "mean": (layer.in_channels,),
            "covariance": (layer.in_channels, *[2 * LAGS + 1] * axes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, as tensors and plain types."""
        return {
            "every": self.schedule.every,
            "forwards": self.schedule.forwards,
            "passes": self.passes,
            "is_over": self.schedule.is_over,
            "sums": {name: value.clone() for name, value in self.sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`.

        Raises:
            ValueError: sums that are not those of this layer; nothing was changed.
        """
        shapes = {name: tuple(value.shape) for name, value in state["sums"].items()}
        if shapes and shapes != self._shapes():
            raise ValueError(f"`sums` must have the shapes {self._shapes()}, got {shapes}")
        every, forwards = int(state["every"]), int(state["forwards"])
        self.schedule = Schedule(self.schedule.phase, every, forwards, bool(state["is_over"]))
        self.passes = int(state["passes"])
        device = self.layer.weight.device
        self.sums = {name: value.to(device) for name, value in state["sums"].items()}


def autocovariance(x: Tensor) -> Tensor:
    """Return the mean over images and pixels of x[y] * x[y + lag], with zeros outside the frame.

    Args:
        x: (N, C, ...).

    Returns:
        (C, 2 * LAGS + 1, ...), for lags from -LAGS to LAGS along each axis.
    """
    axes = tuple(range(2, x.ndim))
    sizes = [x.shape[axis] + LAGS for axis in axes]  # zeros between the end and the start
    spectrum = torch.fft.rfftn(x, s=sizes, dim=axes).abs().square().mean(dim=0)
    lags: Tensor = torch.fft.irfftn(spectrum, s=sizes, dim=tuple(range(1, x.ndim - 1)))
    for axis, size in enumerate(sizes, start=1):
        wanted = torch.arange(-LAGS, LAGS + 1, device=x.device) % size
        lags = lags.index_select(axis, wanted)
    return lags / math.prod(x.shape[2:])


def _read(x: Tensor, conv: DamageConvNd, pixels: Tensor, offsets: Tensor) -> Tensor:
    """Read `x` (N, c, ...), at offsets, where a conv would for these pixels of its output.

    Returns:
        (N, t, p, F * c).
    """
    places = read_places(conv, x.shape[2:], pixels, offsets)  # t, p, F
    by_pixel = x.flatten(2).transpose(1, 2)
    read = by_pixel.index_select(1, places.flatten().clamp(min=0).to(x.device))
    read *= (places >= 0).flatten().to(read)[:, None]
    return read.view(len(x), *places.shape[:2], -1)
