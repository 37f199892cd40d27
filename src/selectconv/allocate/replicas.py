"""A model, its followers and its optimizer: all of them get the same plan, or none does."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from selectconv.allocate.agreement import broadcast_tensors, in_process_group
from selectconv.allocate.optimizer_state import check_owns, check_state_by_parameter, state_of_slots
from selectconv.core.allocation import draw_shift
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import allocation_of, selective_layers, unwrap
from selectconv.core.plan import AllocationPlan
from selectconv.core.slots import zero_slots
from selectconv.errors import AllocationError, naming


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
        followers: Iterable[nn.Module],
    ) -> None:
        self.optimizer = optimizer
        self.layers = selective_layers(model)
        for name, layer in self.layers.items():
            with naming(name):
                layer.check_owns_weight()
        if optimizer is not None:
            check_owns(optimizer, self.layers)
        if isinstance(followers, nn.Module | Tensor) or not isinstance(followers, Iterable):
            raise TypeError(
                "`followers` must be a list of models, such as [ema]; "
                f"got {type(followers).__name__}."
            )
        self.followers = [self._layers_of(follower) for follower in followers]

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(iter(self.layers.values())).gate.device

    def broadcast(self) -> None:
        """Give every rank the allocation and the shifts of rank 0, whatever it had before."""
        if not in_process_group():
            return
        for layers in (self.layers, *self.followers):
            tensors = [tensor for layer in layers.values() for tensor in allocation_of(layer)]
            broadcast_tensors(tensors, self.device)

    def shift_everything(self, max_shift: float, generator: torch.Generator) -> None:
        """Give every slot a shift of its own (+S), unless a loaded model has them already."""
        self.broadcast()  # rank 0 alone may have loaded a model
        if any(bool(layer.shifted.any()) for layer in self.layers.values()):
            return
        for name, layer in self.layers.items():
            if layer.shift is None:
                continue
            slots, axes = layer.shift.shape
            drawn = draw_shift(slots, axes, max_shift, generator)
            for own in (layer, *(layers[name] for layers in self.followers)):
                assert own.shift is not None
                own.shift.detach().copy_(drawn)
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
                layer = self.layers[name]
                for own in (layer, *(layers[name] for layers in self.followers)):
                    own.apply_plan(layer_plan)
                for tensor in (
                    state_of_slots(self.optimizer, layer) if len(layer_plan.opened) else ()
                ):
                    zero_slots(tensor, layer.groups, layer_plan.opened)

    def _check(self, plans: Iterable[AllocationPlan]) -> None:
        """Check plans that follow each other against the model and what the optimizer remembers."""
        gates = {name: layer.gate.cpu().clone() for name, layer in self.layers.items()}
        for plan in plans:
            if not isinstance(plan, AllocationPlan):
                raise TypeError(f"`plan` must be an AllocationPlan, got {type(plan).__name__}.")
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
                        check_state_by_parameter(self.optimizer)
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
        if not isinstance(follower, nn.Module):
            raise TypeError(f"`followers` must be models, got {type(follower).__name__}.")
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
