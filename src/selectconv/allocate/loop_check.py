"""What a training loop did since the last step, as far as it cannot be meant: a warning each."""

from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor

from selectconv.allocate.replicas import Replicas
from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.slots import living_layers

# Layers that need no other allocator: those of any allocator's model and followers, and copies
# that are trained.
_left_alone: WeakSet[SelectConvNd] = WeakSet()
_stepped_by: WeakKeyDictionary[SelectConvNd, int] = WeakKeyDictionary()  # the id of a LoopCheck


class LoopCheck:
    """Warns, once of each, of what makes an allocator's steps useless or wrong.

    It compares how things stand before a step with how they stood after the last one.

    Args:
        replicas: the model, its followers and its optimizers.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._said: set[str] = set()
        self._has_stepped = False
        for layers in (replicas.layers, *replicas.followers):
            _left_alone.update(layers.values())
        self._sums = self._sum_copies({})
        self._frozen: dict[tuple[str, int], int] = {}
        self._is_changed, self._steps_seen = False, 0
        self._stamps = self._stamp()

    def check(self) -> None:
        """Look at what has happened since the last step, before the next one."""
        replicas = self._replicas
        self.before_change()
        if self._has_stepped and self._stamps:
            if not self._is_changed:
                self._warn(
                    "no weight has changed since the last step: train the very model that was "
                    "given to the allocator, and step once per epoch."
                )
            elif replicas.optimizers and replicas.optimizer_steps[0] == self._steps_seen:
                self._warn(
                    "`optimizer` has not stepped since the last step, but weights have changed: "
                    "if there is a new optimizer, set allocator.optimizer to it."
                )
            if _stepped_by.get(next(iter(replicas.layers.values()))) != id(self):
                self._warn("another allocator steps the same model: keep one of them.")
        frozen, self._frozen = (
            self._frozen,
            {
                (name, layer.num_loads): layer.weight._version
                for name, layer in replicas.layers.items()
                if layer.is_frozen and not layer.weight.is_inference()
            },
        )
        changed = (key[0] for key in frozen if self._frozen.get(key, frozen[key]) != frozen[key])
        if (name := next(changed, None)) is not None:
            self._warn(
                f"`{name}` is frozen, but its weights change: if it belongs to an average of the "
                "weights (a teacher inside the model), give the allocator the trained part alone, "
                "and the average as followers=[teacher]."
            )
        sums, self._sums = self._sums, self._sum_copies(self._sums)
        if any(sums.get(key, total) != total for key, total in self._sums.items()):
            self._warn(
                "a copy of the model has changed since the last step, and is not among "
                "`followers`: if it is an average of the weights, pass it as followers=[copy]. "
                "Without that it keeps averaging weights of channels that are no longer read."
            )

    def before_change(self) -> None:
        """Note whether weights have changed, before the allocator itself changes them."""
        self._is_changed |= self._stamps != self._stamp()

    def after_change(self) -> None:
        """Note how the weights stand after the allocator has changed them."""
        self._stamps = self._stamp()

    def after_step(self) -> None:
        """Begin anew: what follows has happened since this step."""
        self._has_stepped, self._is_changed = True, False
        self._steps_seen = self._replicas.optimizer_steps[0]
        _stepped_by.update(dict.fromkeys(self._replicas.layers.values(), id(self)))

    def _warn(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message)

    def _stamp(self) -> list[tuple[int, float]]:
        """Return what changes with the weights: torch's counts of writes in place.

        Optimizers that write into `weight.data` are not counted: the sum of one weight tells.
        """
        weights = [
            weight
            for layer in self._replicas.layers.values()
            if (weight := layer._parameters.get("weight")) is not None  # not recomputed
            and weight.requires_grad
            and not weight.is_meta
        ]
        sums = [(0, _sum(weight)) for weight in weights[:1]]
        return [(id(w), 0.0 if w.is_inference() else float(w._version)) for w in weights] + sums

    def _sum_copies(
        self, known: dict[tuple[ref[SelectConvNd], int], float]
    ) -> dict[tuple[ref[SelectConvNd], int], float]:
        """Return the sums of the weights of copies, by copy and number of states it has loaded.

        The first layer that is trained speaks for all; its copies by `copy.deepcopy` have its
        `family`.
        """
        sums = {}
        own = next((x for x in self._replicas.layers.values() if not x.is_frozen), None)
        for layer in list(living_layers):
            key, weight = (ref(layer), layer.num_loads), layer._parameters.get("weight")
            if own is None or layer.family != own.family or layer in _left_alone:
                continue
            if weight is not None and not weight.is_meta:
                sums[key] = _sum(weight)
                if weight.requires_grad and key not in known:
                    _leave_alone_if_trained(layer)
        return sums


def _sum(weight: Tensor) -> float:
    return float(weight.detach().double().sum())


def _leave_alone_if_trained(copy: SelectConvNd) -> None:
    """Leave a copy of a model alone as soon as it gets gradients: it is no average."""
    known = ref(copy)

    def leave(_: Tensor) -> None:
        if (layer := known()) is not None:
            _left_alone.add(layer)

    copy.weight.register_post_accumulate_grad_hook(leave)
