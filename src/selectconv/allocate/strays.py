"""Copies of a model that change beside it, and that no allocator looks after."""

from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd


class Strays:
    """Notices an average of the weights that is not among an allocator's followers.

    A copy may be a snapshot that is kept or loaded anew, or be trained by itself. What is told here
    is one whose weights change although it has no gradients and has loaded nothing.

    Args:
        layers: the model's selective layers.
        followers: those of its followers.
    """

    def __init__(
        self, layers: Mapping[str, SelectConvNd], followers: Iterable[Mapping[str, SelectConvNd]]
    ) -> None:
        for replica in (layers, *followers):
            for layer in replica.values():
                layer.lineage.owned.add(layer)
        trained = [layer for layer in layers.values() if layer.weight.requires_grad]
        self._layer = trained[0] if trained else None  # one of a copy's layers tells for all
        self._sums: WeakKeyDictionary[SelectConvNd, float] = WeakKeyDictionary()
        self._has_warned = False
        self.look()

    def look(self) -> None:
        """Look at all copies, and warn, once, if one has changed since the last look."""
        for copy in () if self._has_warned else self._copies():
            total = float(copy.weight.detach().double().sum())
            before = self._sums.get(copy, total)
            self._sums[copy] = total
            was_loaded = copy in copy.lineage.loaded
            copy.lineage.loaded.discard(copy)
            if total != before and copy.weight.grad is None and not was_loaded:
                self._has_warned = True
                warn(
                    "a copy of the model has changed since the last step, and is not among "
                    "`followers`: if it is an average of the weights, pass it as followers=[copy]. "
                    "Without that it keeps averaging weights of channels that are no longer read."
                )
                return

    def _copies(self) -> Iterator[SelectConvNd]:
        if self._layer is None:
            return
        lineage = self._layer.lineage
        for copy in list(lineage.layers):
            if copy not in lineage.owned and not copy.weight.is_meta:
                yield copy
