"""A model, its followers and its optimizer: all of them get the same plan, or none does."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.agreement import agree, in_process_group
from selectconv.allocate.filters import clear_channels
from selectconv.allocate.optimizers import (
    as_optimizers,
    check_owns,
    state_of,
)
from selectconv.checks import warn
from selectconv.core.allocation import draw_shift
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import allocation_of, selective_layers, unwrap
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.core.slots import write_slots
from selectconv.errors import AllocationError, BadType, naming
from selectconv.graph.channels import by_output

_FORGOTTEN = "the follower was restored without its state: load its own state_dict, or the model's"


class Replicas:
    """What a plan is carried out on: all of them, or none.

    Args:
        model: the model that is trained, without wrappers.
        optimizer: what trains it: an optimizer, a list of them, or None.
        followers: copies of the model, such as an average of its weights.

    Attributes:
        layers: the model's selective layers by name.
        followers: those of each follower.
        trained_by: all optimizers that were given.
        optimizers: those of them that train selective layers.
        optimizer_steps: how many steps they have taken, as a list of this number: an optimizer
            that held the replicas would keep the model alive.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `followers` are not models.
        AllocationError: a layer whose weight is recomputed, an optimizer of other parameters, or
            followers that differ from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        followers: Sequence[nn.Module],
    ) -> None:
        self.layers = selective_layers(model)
        for name, layer in self.layers.items():
            with naming(name):
                layer.check_owns_weight()
        self.optimizer_steps = [0]
        self.train_with(optimizer)
        if not isinstance(followers, Sequence) or not all(
            isinstance(follower, nn.Module) for follower in followers
        ):
            raise BadType(f"`followers` must be a list of models, got {followers!r:.60}.")
        self.followers = [self._layers_of(follower) for follower in followers]
        self._given = followers
        self.look_at_followers()
        # Plans that close filters also name layers that are not selective.
        self._models = [dict(unwrap(one).named_modules()) for one in (model, *followers)]

    def train_with(self, optimizer: Any) -> None:
        """Take the optimizer that trains the model, a list of them, or None."""
        given = as_optimizers(optimizer)
        check_owns(given, self.layers)
        self.optimizer, self.trained_by = optimizer, given
        own = {id(p) for layer in self.layers.values() for p in layer.parameters()}
        self.optimizers = [
            one
            for one in given
            if any(id(p) in own for group in one.param_groups for p in group["params"])
        ]
        for one in self.optimizers:
            one.register_step_post_hook(
                lambda *_, steps=self.optimizer_steps: steps.append(steps.pop() + 1)
            )

    def look_at_followers(self) -> None:
        """Remember the followers that are fresh beside a model that has been allocated."""
        self._fresh = [
            (layers, _count_loads(layers))
            for given, layers in zip(self._given, self.followers, strict=True)
            # torch's AveragedModel begins with a copy of the model.
            if getattr(given, "n_averaged", 1) and next(self._differing(layers), None)
        ]

    def _differing(self, layers: dict[str, SelectConvNd]) -> Iterator[tuple[str, str]]:
        """Yield the names of buffers in which a follower differs from the model, by layer."""
        for name, layer in layers.items():
            own = self.layers[name]
            for buffer in ("gate", "index", "shifted"):
                its = getattr(layer, buffer).to(own.gate.device)
                if not torch.equal(its, getattr(own, buffer)):
                    yield name, buffer

    def broadcast(self) -> None:
        """Give every rank the allocation and the shifts of rank 0, whatever it had before."""
        if not in_process_group():
            return
        own = [
            tensor.detach()
            for layers in (self.layers, *self.followers)
            for layer in layers.values()
            for tensor in allocation_of(layer)
        ]
        sent = agree(lambda: [tensor.cpu() for tensor in own], own[0].device)
        for tensor, of_rank_0 in zip(own, sent, strict=True):
            tensor.copy_(of_rank_0)

    def shift_everything(self, max_shift: float, generator: torch.Generator) -> None:
        """Give every slot a shift of its own (+S), unless a loaded model has them already."""
        self.broadcast()  # rank 0 alone may have loaded a model
        has_shifts = any(bool(layer.shifted.any()) for layer in self.layers.values())
        for name, layer in self.layers.items():
            if layer.shift is not None and not layer.is_frozen and not has_shifts:
                slots, axes = layer.shift.shape
                drawn = draw_shift(slots, axes, max_shift, generator)
                for own in self._all(name):
                    own.get_parameter("shift").detach().copy_(drawn)
                    own.shifted.fill_(True)
        self.broadcast()

    def apply(self, *plans: AllocationPlan) -> None:
        """Check plans that follow each other, then carry them out.

        Raises:
            AllocationError: one of them does not fit; nothing was changed.
        """
        # First of all: a rank that fails a check must not keep others waiting for a later message.
        self.broadcast()
        self._check_followers()
        remembered = self._check(plans)
        for plan in plans:
            for name, layer_plan in plan:
                for layer in self._all(name) if name in self.layers else ():
                    layer.carry_out(layer_plan)
                if name not in self.layers or len(layer_plan.filters):
                    self._clear_channels(name, layer_plan)
                for tensor in remembered[name] if len(layer_plan.opened) else ():
                    write_slots(tensor, self.layers[name].groups, layer_plan.opened)

    @torch.no_grad()
    def _clear_channels(self, name: str, plan: LayerPlan) -> None:
        """Zero the weights of closed filters, and what the optimizer remembers of them."""
        for modules in self._models:
            layer = modules[name]
            for parameter in (layer.weight, layer.bias):
                if isinstance(parameter, nn.Parameter):
                    for tensor in (parameter, *state_of(self.trained_by, parameter)):
                        clear_channels(layer, tensor, plan)

    def _all(self, name: str) -> list[SelectConvNd]:
        """Return the model's layer of this name, and those of its followers."""
        return [self.layers[name], *(layers[name] for layers in self.followers)]

    def _check(self, plans: Iterable[AllocationPlan]) -> dict[str, list[Tensor]]:
        """Check plans that follow each other; return what is remembered of layers that re-open."""
        remembered = {}
        gates = {name: layer.gate.cpu().clone() for name, layer in self.layers.items()}
        for plan in plans:
            if unknown := sorted(set(plan.layers) - set(self._models[0])):
                raise AllocationError(
                    f"`plan` names layers that the model does not have: {unknown[:4]}."
                )
            for name, layer_plan in plan:
                with naming(name):
                    self._check_filters(name, layer_plan)
                    if name not in self.layers:
                        continue
                    layer, gate = self.layers[name], gates[name]
                    layer_plan.check(gate, len(layer.kernel_size), can_open=layer.shift is not None)
                    if len(layer_plan.opened):
                        remembered[name] = [
                            tensor
                            for parameter in (layer.weight, layer.shift)
                            if parameter is not None
                            for tensor in state_of(self.optimizers, parameter)
                        ]
                gate[layer_plan.closed] = False
                gate[layer_plan.opened] = True
        return remembered

    def _check_filters(self, name: str, plan: LayerPlan) -> None:
        """Check that a layer has the filters and, if not selective, the inputs of a plan."""
        layer = self._models[0][name]
        weight = layer._parameters.get("weight")
        if weight is None:
            raise AllocationError("the layer has no weight of its own.")
        shape = by_output(layer, weight).shape
        numbers = [(plan.filters, shape[0])]
        if name not in self.layers:
            numbers += [(plan.closed, shape[1] if len(shape) > 1 else 0), (plan.opened, 0)]
            list(state_of(self.trained_by, weight))
        for channels, count in numbers:
            if len(channels) and int(channels.max()) >= count:
                raise AllocationError(f"`plan` names channel {int(channels.max())} of {count}.")

    def _check_followers(self) -> None:
        """Refuse followers whose allocation was changed by whoever averages them."""
        for layers in self.followers:
            for name, buffer in self._differing(layers):
                layer = layers[name]
                slots = torch.arange(layer.in_channels, device=layer.index.device)
                is_fresh = torch.equal(layer.index, slots) and bool(layer.gate.all())
                raise AllocationError(
                    f"`{name}`: the `{buffer}` of a follower differs from the model's: "
                    + (
                        f"{_FORGOTTEN}."
                        if is_fresh
                        else "an average must not change the allocation (timm: use ModelEmaV3)."
                    )
                )
        if any(_count_loads(layers) == loads for layers, loads in self._fresh):
            warn(f"{_FORGOTTEN}; its weights do not belong to the model's allocation.")
        self._fresh = []

    def _layers_of(self, follower: nn.Module) -> dict[str, SelectConvNd]:
        """Return a follower's selective layers, which must be those of the model."""
        if getattr(follower, "use_buffers", False):
            # torch averages integers through floats and truncates: 29 becomes 28.
            raise AllocationError(
                "`followers` holds an AveragedModel with use_buffers=True, which would average the "
                "allocation itself: use use_buffers=False, and update_bn for batch norm."
            )
        layers = selective_layers(unwrap(follower))
        own, its = (
            {(name, tuple(layer.weight.shape)) for name, layer in one.items()}
            for one in (self.layers, layers)
        )
        if own != its:
            raise AllocationError(
                "`followers` must have the model's selective layers; "
                f"they differ at {min(own ^ its)[0]!r}."
            )
        return layers


def _count_loads(layers: dict[str, SelectConvNd]) -> int:
    return sum(layer.num_loads for layer in layers.values())
