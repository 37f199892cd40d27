"""Averages of a model's weights that nobody named as followers."""

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.slots import living_layers, new_family


class UnnamedAverages:
    """Notices an average of the weights that is not among an allocator's followers.

    An average is a copy of the model whose weights change although it has no gradients and has
    loaded nothing. Copies by `copy.deepcopy` have their layers' `family` number.

    Args:
        layers: the model's selective layers.
        followers: those of its followers.
    """

    def __init__(
        self, layers: Mapping[str, SelectConvNd], followers: Iterable[Mapping[str, SelectConvNd]]
    ) -> None:
        for follower in followers:
            for layer in follower.values():
                layer.family = new_family()  # looked after: a copy of nobody's any more
        trained = [layer for layer in layers.values() if layer.weight.requires_grad]
        self._layer = trained[0] if trained else None  # one layer of a copy speaks for all
        self._seen = self._look()

    def check(self) -> None:
        """Warn, once, if a copy has changed since the last check."""
        before, self._seen = self._seen, self._look()
        for copy, (total, loads) in self._seen.items():
            was = before.get(copy, (total, loads))
            if was[0] != total and was[1] == loads and copy.weight.grad is None:
                self._layer = None
                warn(
                    "a copy of the model has changed since the last step, and is not among "
                    "`followers`: if it is an average of the weights, pass it as followers=[copy]. "
                    "Without that it keeps averaging weights of channels that are no longer read."
                )
                return

    def _look(self) -> WeakKeyDictionary[SelectConvNd, tuple[float, int]]:
        """Return, by copy, the sum of its weights and the number of states it has loaded."""
        own = self._layer
        if own is None:
            return WeakKeyDictionary()
        return WeakKeyDictionary(
            {
                layer: (float(layer.weight.detach().double().sum()), layer.num_loads)
                for layer in list(living_layers)
                if layer.family == own.family and layer is not own and not layer.weight.is_meta
            }
        )
