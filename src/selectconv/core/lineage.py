"""Which layers are copies of one another, so that an average beside the model can be noticed."""

from typing import Any
from weakref import WeakSet


class Lineage:
    """What a layer shares with its copies by `copy.deepcopy`; an unpickled layer begins anew.

    Attributes:
        layers: the layers that are alive.
        owned: those that an allocator looks after, as its model's or a follower's.
        loaded: those that have loaded a state since an allocator last looked.
    """

    def __init__(self) -> None:
        self.layers: WeakSet[Any] = WeakSet()
        self.owned: WeakSet[Any] = WeakSet()
        self.loaded: WeakSet[Any] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lineage":
        return self

    def __reduce__(self) -> tuple[type["Lineage"], tuple[()]]:
        return Lineage, ()
