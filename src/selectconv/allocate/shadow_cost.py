"""What a model would cost with another allocation: counted on a copy of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.core.slots import new_family
from selectconv.deploy.cost import Cost, CostCounter
from selectconv.graph.dataflow import check_modules, copy_model


class ShadowCost:
    """Counts a copy of a model; what the copy computes does not matter, only its allocation.

    Args:
        model: a model with selective layers; it is left as it is.
        example_input: as for `sc.count`.

    Attributes:
        layers: the copy's selective layers by name; their gates are overwritten by each `count`.

    Raises:
        CompressionError: the model cannot be copied or counted.
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        check_modules(model)
        shadow = copy_model(model).eval()
        self.layers = selective_layers(shadow)
        for layer in self.layers.values():
            layer.family = new_family()
        self._counter = CostCounter(shadow, example_input)

    def count(self, gates: Mapping[str, Tensor]) -> Cost:
        """Count the model with these gates, one for each layer."""
        for name, layer in self.layers.items():
            layer.gate.copy_(gates[name])
        return self._counter.count()

    @torch.no_grad()
    def follow(self, layers: Mapping[str, SelectConvNd]) -> None:
        """Let the copy's slots read what those of the model's layers read now."""
        for name, shadow in self.layers.items():
            layer = layers[name]
            shadow.index.copy_(layer.index)
            shadow.shifted.copy_(layer.shifted)
            if shadow.shift is not None and layer.shift is not None:
                shadow.shift.copy_(layer.shift)
