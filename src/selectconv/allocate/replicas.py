"""A model, its followers and its optimizer: all of them get the same plan, or none does."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from selectconv.allocate.agreement import broadcast_tensors, in_process_group
from selectconv.allocate.optimizer_state import check_owns, check_state_by_parameter, state_of_slots
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers, unwrap
from selectconv.core.plan import AllocationPlan
from selectconv.core.slots import draw_shift
from selectconv.errors import AllocationError, naming


class Replicas:
    """What a plan is carried out on: all of them, or none.

    Args:
        model: the model that is trained, without wrappers.
        optimizer: what trains it, or None.
        followers: copies of the model, such as an average of its weights.

    Attributes:
        layers: the model's selective layers by name.
        all: these, then those of each follower.

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
        check_weights(self.layers)
        if optimizer is not None:
            check_owns(optimizer, self.layers)
        if isinstance(followers, nn.Module | Tensor) or not isinstance(followers, Iterable):
            raise TypeError(
                "`followers` must be a list of models, such as [ema]; "
                f"got {type(followers).__name__}."
            )
        self.all = [self.layers, *(self._match(follower) for follower in followers)]

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(iter(self.layers.values())).weight.device

    def broadcast(self) -> None:
        """Give every rank the allocation and the shifts of rank 0, whatever it had before."""
        if not in_process_group():
            return
        for layers in self.all:
            broadcast_tensors(
                [
                    tensor
                    for layer in layers.values()
                    for tensor in (layer.gate, layer.index, layer.moved, layer.shifted, layer.shift)
                    if tensor is not None
                ],
                self.device,
            )

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
            for layers in self.all:
                own = layers[name]
                assert own.shift is not None
                with torch.no_grad():
                    own.shift.copy_(drawn)
                own.shifted.fill_(True)
        self.broadcast()

    def apply(self, plan: AllocationPlan) -> None:
        """Check everything, then carry the plan out.

        Raises:
            AllocationError: the plan does not fit; nothing was changed.
        """
        if not isinstance(plan, AllocationPlan):
            raise TypeError(f"`plan` must be an AllocationPlan, got {type(plan).__name__}.")
        # First of all: a rank that fails a check must not keep others waiting for a later message.
        self.broadcast()
        self._check_followers()
        forgotten = self._check(plan, self.all)
        for name, layer_plan in plan:
            for layers in self.all:
                layers[name].apply_checked_plan(layer_plan)
            for tensor in forgotten[name]:
                self.layers[name].zero_slots(tensor, layer_plan.opened)

    def rehearse(self, plans: Iterable[AllocationPlan]) -> None:
        """Check plans that follow each other, on layers of which only the gates are copies."""
        rehearsed = []
        for layers in self.all:
            twins = {name: copy.copy(layer) for name, layer in layers.items()}
            for twin in twins.values():
                twin._buffers = {**twin._buffers, "gate": twin.gate.clone()}
            rehearsed.append(twins)
        for plan in plans:
            self._check(plan, rehearsed)
            for twins in rehearsed:
                for name, layer_plan in plan:
                    gate = twins[name].gate
                    gate.index_fill_(0, layer_plan.closed.to(gate.device), False)
                    gate.index_fill_(0, layer_plan.opened.to(gate.device), True)

    def _check(
        self, plan: AllocationPlan, replicas: Iterable[Mapping[str, SelectConvNd]]
    ) -> dict[str, list[Tensor]]:
        """Check a plan against all replicas; return what re-opened slots must forget, by layer."""
        unknown = sorted(set(plan.layers) - set(self.layers))
        if unknown:
            raise AllocationError(
                f"`plan` names layers that the model does not have: {unknown[:4]}."
            )
        if any(len(layer_plan.opened) for _, layer_plan in plan):
            check_state_by_parameter(self.optimizer)
        forgotten = {}
        for name, layer_plan in plan:
            with naming(name):
                for layers in replicas:
                    layers[name].check_plan(layer_plan)
                _check_seed(layer_plan.weight_seed)
                forgotten[name] = (
                    state_of_slots(self.optimizer, self.layers[name])
                    if len(layer_plan.opened)
                    else []
                )
        return forgotten

    def _check_followers(self) -> None:
        """Refuse followers whose allocation was changed by whoever averages them."""
        for layers in self.all[1:]:
            for name, layer in layers.items():
                own = self.layers[name]
                for buffer in ("gate", "index", "shifted"):
                    its = getattr(layer, buffer).to(own.gate.device)
                    if not torch.equal(its, getattr(own, buffer)):
                        raise AllocationError(
                            f"`{name}`: the `{buffer}` of a follower differs from the model's: an "
                            "average must not change the allocation (timm: use ModelEmaV3)."
                        )

    def _match(self, follower: nn.Module) -> dict[str, SelectConvNd]:
        if getattr(follower, "use_buffers", False):
            # torch averages integers through floats and truncates: 29 becomes 28.
            raise AllocationError(
                "`followers` holds an AveragedModel with use_buffers=True, which would average the "
                "allocation itself: use use_buffers=False, and update_bn for batch norm."
            )
        if not isinstance(follower, nn.Module):
            raise TypeError(f"`followers` must be models, got {type(follower).__name__}.")
        layers = selective_layers(unwrap(follower))
        own = {name: tuple(layer.weight.shape) for name, layer in self.layers.items()}
        its = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
        if its != own:
            different = sorted(set(own.items()) ^ set(its.items()), key=str)
            raise AllocationError(
                "`followers` must have the model's selective layers; "
                f"they differ at {different[0][0]!r}."
            )
        return layers


def check_weights(layers: Mapping[str, SelectConvNd]) -> None:
    """Refuse layers whose weight is recomputed.

    Raises:
        AllocationError: there is such a layer.
    """
    for name, layer in layers.items():
        with naming(name):
            layer.check_owns_weight()


def check_batch_norms(model: nn.Module, layers: Mapping[str, SelectConvNd]) -> None:
    """Refuse mean sources that read a batch norm which was taken out of the model.

    Raises:
        AllocationError: there is such a layer.
    """
    modules = {id(module) for module in model.modules()}
    for name, layer in layers.items():
        for bn in () if layer.mean_source is None else layer.mean_source.batch_norms():
            if id(bn) in modules:
                continue
            # Another module with the same tensors (SyncBatchNorm's conversion) is as good.
            own = bn.running_mean if bn.weight is None else bn.weight
            if not any(own is tensor for tensor in (*model.parameters(), *model.buffers())):
                raise AllocationError(
                    f"`{name}`: its mean source reads a batch norm that is not in the "
                    "model any more: set `mean_source` to BatchNormMean(the new one, act)."
                )


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed < 1 << 63:
        raise AllocationError(f"`weight_seed` must be in [0, 2^63), got {seed}.")
