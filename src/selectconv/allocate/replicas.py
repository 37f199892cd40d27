"""A model, its followers and its optimizer: all of them get the same plan, or none does."""

from collections.abc import Iterable, Sequence
from weakref import WeakSet, ref

import torch
from torch import nn

from selectconv.allocate.agreement import agree, in_process_group
from selectconv.allocate.optimizers import check_owns, state_of_slots
from selectconv.checks import warn
from selectconv.core.allocation import draw_shift
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import allocation_of, selective_layers, unwrap
from selectconv.core.plan import AllocationPlan
from selectconv.core.slots import living_layers, write_slots
from selectconv.errors import AllocationError, naming

_looked_after: WeakSet[SelectConvNd] = WeakSet()  # by any allocator, as its model's or a follower's


class Replicas:
    """What a plan is carried out on: all of them, or none.

    Args:
        model: the model that is trained, without wrappers.
        optimizer: what trains it, or None.
        followers: copies of the model, such as an average of its weights.

    Attributes:
        layers: the model's selective layers by name.
        followers: those of each follower.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `followers` are not models.
        AllocationError: a layer whose weight is recomputed, an optimizer of other parameters, or
            followers that differ from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        followers: Sequence[nn.Module],
    ) -> None:
        self.optimizer = optimizer
        self.layers = selective_layers(model)
        for name, layer in self.layers.items():
            with naming(name):
                layer.check_owns_weight()
        if optimizer is not None:
            check_owns(optimizer, self.layers)
        if not isinstance(followers, Sequence) or not all(
            isinstance(follower, nn.Module) for follower in followers
        ):
            raise TypeError(f"`followers` must be a list of models, got {followers!r:.60}.")
        self.followers = [self._layers_of(follower) for follower in followers]

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
            if layer.shift is not None and not has_shifts:
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
        self._check(plans)
        for plan in plans:
            for name, layer_plan in plan:
                for layer in self._all(name):
                    layer.carry_out(layer_plan)
                if len(layer_plan.opened):
                    for tensor in state_of_slots(self.optimizer, self.layers[name]):
                        write_slots(tensor, self.layers[name].groups, layer_plan.opened)

    def _all(self, name: str) -> list[SelectConvNd]:
        """Return the model's layer of this name, and those of its followers."""
        return [self.layers[name], *(layers[name] for layers in self.followers)]

    def _check(self, plans: Iterable[AllocationPlan]) -> None:
        """Check plans that follow each other against the model and what the optimizer remembers."""
        gates = {name: layer.gate.cpu().clone() for name, layer in self.layers.items()}
        for plan in plans:
            if unknown := sorted(set(plan.layers) - set(self.layers)):
                raise AllocationError(
                    f"`plan` names layers that the model does not have: {unknown[:4]}."
                )
            for name, layer_plan in plan:
                layer, gate = self.layers[name], gates[name]
                with naming(name):
                    layer.check_owns_weight()
                    layer_plan.check(gate, len(layer.kernel_size), can_open=layer.shift is not None)
                    if len(layer_plan.opened):
                        list(state_of_slots(self.optimizer, layer))
                gate[layer_plan.closed] = False
                gate[layer_plan.opened] = True

    def _check_followers(self) -> None:
        """Refuse followers whose allocation was changed by whoever averages them."""
        for layers in self.followers:
            for name, layer in layers.items():
                own = self.layers[name]
                for buffer in ("gate", "index", "shifted"):
                    its = getattr(layer, buffer).to(own.gate.device)
                    if not torch.equal(its, getattr(own, buffer)):
                        raise AllocationError(
                            f"`{name}`: the `{buffer}` of a follower differs from the model's: an "
                            "average must not change the allocation (timm: use ModelEmaV3)."
                        )

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


class UnnamedAverages:
    """Notices an average of the weights that is not among an allocator's followers.

    An average is a copy of the model whose weights change although it has no gradients and has
    loaded nothing. One layer speaks for all; its copies by `copy.deepcopy` have its `family`.

    Args:
        replicas: the model and its followers.
    """

    def __init__(self, replicas: Replicas) -> None:
        for layers in (replicas.layers, *replicas.followers):
            _looked_after.update(layers.values())
        trained = (layer for layer in replicas.layers.values() if layer.weight.requires_grad)
        self._own = next(trained, None)
        self._seen = self._look()

    def check(self) -> None:
        """Warn, once, if a copy has changed since the last check."""
        before, self._seen = self._seen, self._look()
        if any(before.get(key, total) != total for key, total in self._seen.items()):
            self._own = None
            warn(
                "a copy of the model has changed since the last step, and is not among "
                "`followers`: if it is an average of the weights, pass it as followers=[copy]. "
                "Without that it keeps averaging weights of channels that are no longer read."
            )

    def _look(self) -> dict[tuple[ref[SelectConvNd], int], float]:
        """Return the sums of the copies' weights, by copy and number of states it has loaded."""
        own = self._own
        return {
            (ref(layer), layer.num_loads): float(layer.weight.detach().double().sum())
            for layer in list(living_layers)
            if own is not None and layer.family == own.family and layer not in _looked_after
            if layer.weight.grad is None and not layer.weight.is_meta
        }
