"""CondenseNet's learned group convolution: the baseline of Table 2 (supplement, "LGC").

A 1x1 conv is trained dense. In each condensing stage every group of its filters drops the inputs
that its weights use least, until one part in `condense_factor` is left; `condense` then writes it
as what it has become: a selection of channels and a group convolution.
"""

from collections.abc import Iterable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.allocate.report import AllocationReport
from selectconv.checks import check_count, check_non_negative
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.errors import BadValue

_SMALLEST_NORM = 1e-12  # below it a group's norm has no usable gradient


class LearnedGroupConv2d(nn.Conv2d):
    """A 1x1 conv whose groups of filters each learn which inputs they read.

    Filter j belongs to group `j % num_groups`. A fresh layer computes what the dense conv computes.

    Attributes:
        reads: (groups, I) bool buffer: the inputs that each group of filters still reads.
        num_groups: how many groups there are.
        condense_factor: in the end each group reads one input in `condense_factor`.

    Example:
        >>> layer = LearnedGroupConv2d.from_conv(nn.Conv2d(8, 4, 1, bias=False), 2, 4)
        >>> layer.condense(1).shape, layer.reads.sum(dim=1)
        (torch.Size([4]), tensor([6, 6]))
    """

    reads: Tensor
    num_groups: int
    condense_factor: int

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, num_groups: int, condense_factor: int) -> Self:
        """Make a learned group conv that shares the weight of a dense 1x1 conv without a bias.

        Raises:
            TypeError, ValueError: sizes that do not divide its channels.
        """
        check_count("condense_factor", condense_factor, 1)
        if conv.out_channels % num_groups or conv.in_channels % condense_factor:
            raise BadValue(
                f"`num_groups` {num_groups} must divide the {conv.out_channels} outputs and "
                f"`condense_factor` {condense_factor} the {conv.in_channels} inputs."
            )
        layer = cls.__new__(cls)
        layer.__dict__.update(conv.__dict__)
        for own in ("_parameters", "_buffers", "_modules"):
            layer.__dict__[own] = conv.__dict__[own].copy()
        layer.num_groups = num_groups
        layer.condense_factor = condense_factor
        reads = conv.weight.new_ones(num_groups, conv.in_channels, dtype=torch.bool)
        layer.register_buffer("reads", reads)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with zeros for what a group has dropped."""
        size = self.out_channels // self.num_groups
        reads = self.reads[:, :, None, None].repeat(size, 1, 1, 1)
        weight = torch.where(reads, self.weight, 0.0)
        return F.conv2d(input, weight)

    @torch.no_grad()
    def condense(self, stage: int) -> Tensor:
        """Drop inputs until `stage` parts in `condense_factor` are gone, those of least L1 norm.

        Args:
            stage: 0 to `condense_factor` - 1; a stage that was reached already drops nothing.

        Returns:
            What was dropped, as `group * in_channels + input`, sorted, int64, on the CPU.
        """
        most = self.in_channels * (self.condense_factor - stage) // self.condense_factor
        excess = max(0, int(self.reads[0].sum()) - most)
        # Dropped inputs sort after all others.
        norms = self._by_group(self.weight).abs().sum(dim=0)  # (groups, I)
        order = norms.masked_fill(~self.reads, torch.inf).sort(dim=1, stable=True).indices
        dropped = order[:, :excess]
        self.reads.scatter_(1, dropped, False)
        first = torch.arange(self.num_groups, device=dropped.device)[:, None] * self.in_channels
        return (dropped + first).flatten().sort().values.cpu()

    def group_lasso(self) -> Tensor:
        """Sum, over groups and inputs, the L2 norm of the weights from that input to that group."""
        squares = (self._by_group(self.weight).square().sum(dim=0) * self.reads).flatten()
        return squares.clamp(min=_SMALLEST_NORM).sqrt().sum()

    def _by_group(self, weight: Tensor) -> Tensor:
        """View the weight (O, I, 1, 1) as (O / groups, groups, I): groups are interleaved."""
        return weight.view(-1, self.num_groups, self.in_channels)


class CondensedConv2d(nn.Module):
    """What a learned group conv becomes: select channels, convolve in groups, reorder the outputs.

    Args:
        layer: a learned group conv; it is left as it is.
    """

    index: Tensor

    def __init__(self, layer: LearnedGroupConv2d) -> None:
        super().__init__()
        groups, weight = layer.num_groups, layer.weight
        width = int(layer.reads[0].sum())
        inputs = layer.reads.nonzero()[:, 1].view(groups, width)
        self.register_buffer("index", inputs.flatten())
        self.conv = nn.Conv2d(
            groups * width,
            layer.out_channels,
            1,
            groups=groups,
            bias=False,
            device=weight.device,
            dtype=weight.dtype,
        )
        by_group = layer._by_group(weight.detach()).transpose(0, 1)  # (groups, O / groups, I)
        kept = by_group.gather(2, inputs[:, None, :].expand(-1, by_group.shape[1], -1))
        self.conv.weight = nn.Parameter(kept.reshape(self.conv.weight.shape).clone())

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the learned group conv computes."""
        y: Tensor = self.conv(torch.index_select(x, 1, self.index))
        # The channel shuffle: from one group after the other to one filter of each group in turn.
        by_group: Tensor = y.unflatten(1, (self.conv.groups, -1))
        return by_group.transpose(1, 2).flatten(1, 2)


def condense(model: nn.Module, log: Iterable[AllocationReport] = ()) -> nn.Module:
    """Replace a model's learned group convs, in place, by selections and group convs.

    Call it when the training is over: the result computes the same with fewer parameters, and
    cannot be condensed further.

    Args:
        model: any model; without learned group convs nothing happens.
        log: what a training has dropped, for a model that was not trained itself.

    Returns:
        The same model object.

    Raises:
        ValueError: the log is of another model.

    Example:
        >>> import selectconv as sc
        >>> options = {"growth_rates": (4, 4, 4), "units": (1, 1, 1), "condense_factor": 4}
        >>> model = sc.create_model("condensenet182", **options)
        >>> sum(p.numel() for p in model.parameters())
        1642
        >>> report = Condenser(model, total_epochs=2).step(epoch=0)
        >>> sum(p.numel() for p in condense(model).parameters())
        1210
    """
    layers = learned_group_convs(model)
    for report in log:
        for name, plan in report.plan:
            dropped = plan.closed.tolist()
            if name not in layers or max(dropped, default=0) >= layers[name].reads.numel():
                raise BadValue(f"its log does not fit the network at {name!r}.")
            layers[name].reads.view(-1)[dropped] = False
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, CondensedConv2d(layer))
    return model


def learned_group_convs(model: nn.Module) -> dict[str, LearnedGroupConv2d]:
    """Return a model's learned group convs by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LearnedGroupConv2d)}


class Condenser:
    """Condense a model's learned group convs while it trains: call `step` after each epoch.

    With a condense factor C there are C - 1 stages, evenly over the first half of the training: for
    4 after 1/6, 2/6 and 3/6 of the epochs. All state is in the layers' buffers.

    Args:
        model: a model with learned group convs.
        total_epochs: the length of the training.
        group_lasso: strength of the group-lasso regularisation that `regularize` adds.

    Raises:
        TypeError, ValueError: an argument that is not accepted, or nothing to condense.
    """

    def __init__(self, model: nn.Module, *, total_epochs: int, group_lasso: float = 0.0) -> None:
        self.total_epochs = check_count("total_epochs", total_epochs, 1)
        self.group_lasso = check_non_negative("group_lasso", group_lasso)
        self.layers = learned_group_convs(model)
        if not self.layers:
            raise BadValue(
                "`model` has no learned group convs: build it with "
                'sc.create_model("condensenet182", condense_factor=4).'
            )

    def step(self, epoch: int) -> AllocationReport:
        """Bring every layer to the stage that is due after `epoch` (0-based).

        Returns:
            What was dropped, as `group * in_channels + input`; false when nothing changed.
        """
        plans = {}
        for name, layer in self.layers.items():
            last = layer.condense_factor - 1
            stage = min((epoch + 1) * 2 * last // self.total_epochs, last)
            dropped = layer.condense(stage)
            if len(dropped):
                plans[name] = LayerPlan(closed=dropped)
        return AllocationReport(epoch, AllocationPlan(plans))

    def regularize(self) -> None:
        """Add the gradient of the group lasso to the weights' gradients, after `backward`."""
        if self.group_lasso == 0:
            return
        weights = [layer.weight for layer in self.layers.values()]
        penalty = torch.stack([layer.group_lasso() for layer in self.layers.values()]).sum()
        gradients = torch.autograd.grad(self.group_lasso * penalty, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    def num_dropped(self) -> int:
        """Count the pairs of a group and an input that it no longer reads."""
        return sum(int((~layer.reads).sum()) for layer in self.layers.values())
