"""Closing whole filters: a channel goes in all its readers at once, so that nothing is gathered.

A selective conv closes its slot. Other readers have no gate: their weights for the channel become
zero, and so does all that makes the channel. Then neither gets a gradient, so both stay zero, and
`compress` removes them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.optimizers import check_owns
from selectconv.checks import warn
from selectconv.core.ecdm import expected_damage, normalize_ecdm
from selectconv.core.layer import SelectConvNd
from selectconv.core.mean_source import ClosedForm, ObservedMean
from selectconv.core.plan import LayerPlan
from selectconv.deploy.parts import BLOCK
from selectconv.errors import AllocationError, MeanSourceError, naming
from selectconv.graph.channels import ChannelGroup, Mask, by_output, find_groups
from selectconv.graph.dataflow import trace_dataflow
from selectconv.graph.input_mean import closed_form_of

# Fewer channels are closed one by one: blocks would make the budgets of small networks coarse.
_FEW = 32


class Observer(ObservedMean):
    """Observes the input of a layer that is not selective while it trains: a forward pre-hook.

    Attributes:
        moments: mean and variance of each channel, and the number of batches.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__(pooled=False)  # rank 0 decides
        self.mean, self.var = torch.zeros(2, channels, device=device)
        self.moments = self.mean, self.var, torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Observe a batch."""
        if module.training:
            self.observe(inputs[0], *self.moments)


@dataclass
class Reader:
    """A conv or linear layer that reads channels which can be closed.

    Attributes:
        layer: the layer.
        source: where the mean of its input comes from; of a selective conv, the layer knows.
        channels: (n,) int64, the channels of its input that can be closed.
        groups: (n,) int64, the numbers of the groups that they belong to.
    """

    layer: nn.Module
    source: ClosedForm | Observer | None
    channels: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        """The layer's weight as (O, I, ...)."""
        weight: Any = self.layer.weight
        return by_output(self.layer, weight.detach())

    def knows_mean(self) -> bool:
        """Return whether the mean of the input is known yet."""
        if isinstance(self.layer, SelectConvNd):
            return self.layer.knows_mean()
        return not isinstance(self.source, Observer) or int(self.source.moments[-1]) > 0

    def is_open(self) -> Tensor:
        """Return which channels of the input are still read, (I,) bool, on the CPU."""
        layer = self.layer
        if not isinstance(layer, SelectConvNd):
            return self.weight.transpose(0, 1).flatten(1).any(dim=1).cpu()
        found = torch.zeros(layer.in_channels, dtype=torch.bool, device="cpu")
        found[layer.index[layer.gate].cpu()] = True
        return found

    def shares(self, damage: str) -> Tensor:
        """Compute each channel's share of every output, nECDM, (I, O), on the CPU."""
        layer, source = self.layer, self.source
        if isinstance(layer, SelectConvNd):
            by_slot = layer.ecdm(normalized=True, damage=damage)
            shares = torch.zeros_like(by_slot).index_add_(0, layer.index, by_slot)
        else:
            assert source is not None
            weight = self.weight

            def moment(name: str) -> Tensor:
                value = getattr(source, name)
                return (value if isinstance(value, Tensor) else value()).to(weight)

            shares = normalize_ecdm(
                expected_damage(weight, moment, damage, not source.is_nonnegative)
            )
        if not bool(shares.isfinite().all()):
            raise AllocationError(
                "the layer's weights or input statistics hold NaN or infinite values."
            )
        return shares.cpu()

    def plan(self, channels: Tensor) -> LayerPlan:
        """Return the plan that closes channels of the input."""
        if isinstance(self.layer, SelectConvNd):
            gate, index = self.layer.gate.cpu(), self.layer.index.cpu()
            return LayerPlan(closed=(gate & torch.isin(index, channels)).nonzero().flatten())
        return LayerPlan(closed=channels)


class Filters:
    """The channels of a model that steps can close in all their readers.

    Args:
        model: the model, without wrappers.
        example_input: as for `sc.count`.

    Attributes:
        groups: channels that go together.
        modules: what makes or reads them, by name.
        families: the numbers of the groups that the same layers make, and how many go at once.
        readers: who reads them, by name.
        left_open: (G,) bool, the groups that the last step left open.
        spared: the numbers of the groups that steps leave alone.

    Raises:
        AllocationError: nothing can be closed; the message says what holds the channels.
        CompressionError: the model cannot be traced.
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        flow = trace_dataflow(model, example_input)
        found = find_groups(flow, model)
        modules = dict(model.named_modules())
        for name in found.held.keys() & modules.keys():
            modules[name]._selectconv_held = found.held[name]
        self.groups: list[ChannelGroup] = [group for group in found.groups if group.readers]
        if not self.groups:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(found.held.items())[:4])
            raise AllocationError(f"no channel of `model` can be closed by filters: {reasons}.")
        pairs: dict[str, list[tuple[int, int]]] = {}
        for number, group in enumerate(self.groups):
            for name, channels in group.readers.items():
                pairs.setdefault(name, []).extend((channel, number) for channel in channels)
        self.readers: dict[str, Reader] = {}
        for name, read in pairs.items():
            channels, numbers = torch.tensor(read, device="cpu").t()
            layer, value = modules[name], found.inputs[name]
            source: ClosedForm | Observer | None = None
            if not isinstance(layer, SelectConvNd):
                source = closed_form_of(flow, value, modules, layer.training) or Observer(
                    flow.operations[value].channels, next(layer.parameters()).device
                )
            self.readers[name] = Reader(layer, source, channels, numbers)
        self.modules = {
            name: modules[name] for group in self.groups for name in (*group.makers, *group.readers)
        }
        by_makers: dict[frozenset[str], list[int]] = {}
        for number, group in enumerate(self.groups):
            by_makers.setdefault(frozenset(group.makers), []).append(number)
        self.families = [
            (torch.tensor(own, device="cpu"), 1 if len(own) < _FEW or len(own) % BLOCK else BLOCK)
            for own in by_makers.values()
        ]
        frozen = set(self.find_frozen())
        for name in {name for group in self.groups for name in group.makers}:
            if all(n in frozen for n, one in enumerate(self.groups) if name in one.makers):
                self.modules[name]._selectconv_held = "frozen layers make or read them"
        if len(frozen) == len(self.groups):
            warn("frozen layers make or read every filter: no step closes any while they do.")
        self.left_open = self.find_open()
        self.spared: list[int] = []
        self._observers = {
            name: reader.source
            for name, reader in self.readers.items()
            if isinstance(reader.source, Observer)
        }
        self._hooks = [
            modules[name].register_forward_pre_hook(one) for name, one in self._observers.items()
        ]

    def find_frozen(self) -> list[int]:
        """Return the numbers of the groups that a frozen layer makes or reads."""
        frozen = {
            name
            for name, module in self.modules.items()
            if any(p is not None and not p.requires_grad for p in module._parameters.values())
        }
        return [
            number
            for number, group in enumerate(self.groups)
            if not frozen.isdisjoint((*group.makers, *group.readers))
        ]

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that optimizers train what steps change, and that filters stay as steps left them.

        Raises:
            AllocationError: there are optimizers, and they do not own everything.
        """
        check_owns(optimizers, self.modules)
        if bool((self.find_open() & ~self.left_open).any()):
            warn(
                "closed filters have opened again: give the allocator the `optimizer`, all of them "
                "if there are several, so that it can clear their momentum."
            )

    def find_open(self) -> Tensor:
        """Return which groups somebody still reads, (G,) bool."""
        is_open = torch.zeros(len(self.groups), dtype=torch.bool, device="cpu")
        for reader in self.readers.values():
            is_open[reader.groups[reader.is_open()[reader.channels]]] = True
        return is_open

    def stop_observing(self) -> None:
        """Leave the layers alone: no step follows."""
        while self._hooks:
            self._hooks.pop().remove()

    def observed_moments(self) -> dict[str, list[Tensor]]:
        """Return what was observed, by layer."""
        return {
            name: [tensor.clone() for tensor in one.moments]
            for name, one in self._observers.items()
        }

    def load_moments(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Restore what `observed_moments` returned."""
        for name in state.keys() & self._observers.keys():
            for own, its in zip(self._observers[name].moments, state[name], strict=True):
                own.copy_(its)

    def unread(self, plans: Mapping[str, LayerPlan]) -> dict[str, Mask]:
        """Return what layers that are not selective do not read, now and after these plans."""
        masks = {}
        for name, reader in self.readers.items():
            if not isinstance(reader.layer, SelectConvNd):
                closed = ~reader.is_open()
                if name in plans:
                    closed[plans[name].closed] = True
                masks[name] = closed.numpy()
        return masks


class FilterQueue:
    """Groups of channels, in the order in which a growing gamma closes them.

    The damage of a group is its largest share of any output of any reader. In that order, shares
    add up in each reader; a group's level is the largest sum that it leads to, in its worst reader.
    So closing all groups up to a level takes no more than that from any output.

    Args:
        filters: the groups.
        damage: as for `SelectConv2d.ecdm`; None: all do the same damage.
        floor: the part of its channels that a reader keeps; at least one.

    Attributes:
        levels: (Q,), the smallest gamma that closes each unit of the queue: a group, or a block
            of eight.
        owners: (Q,), the number of the unit.
        sizes: (Q,), how many groups it has.
    """

    def __init__(self, filters: Filters, damage: str | None, floor: float) -> None:
        self._filters = filters
        count = len(filters.groups)
        is_open = filters.find_open()
        largest = torch.zeros(count, dtype=torch.float64, device="cpu")
        sums: list[tuple[Reader, Tensor, Tensor, Tensor]] = []
        if damage and not any(reader.knows_mean() for reader in filters.readers.values()):
            raise MeanSourceError("no layer has seen any input yet: train the model first.")
        for name, reader in filters.readers.items():
            own, place = reader.groups.unique(return_inverse=True)
            is_read = reader.is_open()
            if damage is None or not reader.knows_mean():
                shares = torch.full((len(is_read), 1), 0.0 if damage is None else math.inf)
            else:
                with naming(name):
                    shares = reader.shares(damage)
            total = shares.new_zeros(len(own), shares.shape[1], dtype=torch.float64)
            total.index_add_(0, place, shares[reader.channels].double())
            largest.scatter_reduce_(0, own, total.amax(dim=1), "amax")
            sums.append((reader, is_read, own, total))
        rank = largest.masked_fill(~is_open, -1).argsort(stable=True).argsort()
        levels = torch.zeros(count, dtype=torch.float64, device="cpu")
        for reader, is_read, own, total in sums:
            by_rank = rank[own].argsort()
            level = total[by_rank].cumsum(dim=0).amax(dim=1)
            widths = torch.zeros(count).index_add_(
                0, reader.groups, is_read[reader.channels].float()
            )[own[by_rank]]
            room = int(is_read.sum()) - max(1, math.ceil(floor * len(is_read)))
            level[widths.cumsum(0) > room] = math.inf
            levels.scatter_reduce_(0, own[by_rank], level, "amax")
        levels[~is_open] = math.inf
        levels[filters.find_frozen() + filters.spared] = math.inf
        self._units = _bundle(filters, levels)
        self.levels = torch.cat([levels[:0], *(levels[unit].amax()[None] for unit in self._units)])
        self.owners = torch.arange(len(self._units), device="cpu")
        self.sizes = torch.tensor([len(unit) for unit in self._units], device="cpu")

    def plans(self, places: Iterable[int]) -> dict[str, LayerPlan]:
        """Return, by layer, the plan that closes the groups at these places of the queue."""
        chosen = torch.cat([self._units[place] for place in places] or [self.owners[:0]])
        filters = self._filters
        plans = {}
        for name, reader in filters.readers.items():
            channels = reader.channels[torch.isin(reader.groups, chosen)]
            if len(channels):
                plans[name] = reader.plan(channels.sort().values)
        silenced: dict[str, list[int]] = {}
        for group in (filters.groups[number] for number in chosen.tolist()):
            if any(not isinstance(filters.readers[n].layer, SelectConvNd) for n in group.readers):
                for name, made in group.makers.items():
                    # A norm without parameters: nothing that has no gate reads it as it is.
                    if filters.modules[name]._parameters.get("weight") is not None:
                        silenced.setdefault(name, []).extend(made)
        for name, made in silenced.items():
            outputs = torch.tensor(sorted(made), device="cpu")
            plans[name] = LayerPlan(closed=plans.get(name, LayerPlan()).closed, filters=outputs)
        return plans


def _bundle(filters: Filters, levels: Tensor) -> list[Tensor]:
    """Return the groups that are closed together, in the order of their levels.

    Layers that make whole blocks of channels keep whole blocks: many runtimes are slow without.
    Their last groups, too few for a block, stay.
    """
    order = levels.argsort(stable=True)
    order = order[levels[order].isfinite()]
    units = (
        unit
        for own, size in filters.families
        for unit in order[torch.isin(order, own)].split(size)
        if len(unit) == size
    )
    return sorted(units, key=lambda unit: float(levels[unit].amax()))


def clear_channels(layer: nn.Module, tensor: Tensor, plan: LayerPlan) -> None:
    """Zero what belongs to a plan's channels in a parameter of a layer, or in its state."""
    view = by_output(layer, tensor) if tensor.ndim > 1 else tensor
    view.index_fill_(0, plan.filters.to(tensor.device), 0)
    if tensor.ndim > 1 and not isinstance(layer, SelectConvNd):
        view.index_fill_(1, plan.closed.to(tensor.device), 0)
