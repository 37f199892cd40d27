"""What a model would cost after a plan: counted on a copy of it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from selectconv.core.models import allocation_of, selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.core.slots import new_family
from selectconv.deploy.cost import Cost, CostCounter
from selectconv.graph.dataflow import copy_model


class CostAfter:
    """Counts what a model would cost after a plan. The model itself is left alone.

    Args:
        model: a model with selective layers.
        example_input: as for `sc.count`.

    Raises:
        CompressionError: the model cannot be copied or counted.
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        copy = copy_model(model).eval()
        self._layers = selective_layers(model)
        self._copies = selective_layers(copy)
        for layer in self._copies.values():
            layer.family = new_family()  # not an average of the model, though its weights change
        self._counter = CostCounter(copy, example_input)

    @torch.no_grad()
    def count(self, plans: Mapping[str, LayerPlan]) -> Cost:
        """Count the model as it is now, and with these plans carried out."""
        for name, layer in self._layers.items():
            copy = self._copies[name]
            for own, its in zip(allocation_of(copy), allocation_of(layer), strict=True):
                own.copy_(its)
            if name in plans:
                copy.apply_plan(replace(plans[name], weight_seed=None))
        return self._counter.count()

    def count_fresh(self, kept: float) -> Cost:
        """Count the model before any allocation, with this part of each group's slots open."""
        for layer in self._copies.values():
            width = layer.in_channels // layer.groups
            is_open = torch.arange(width, device="cpu") < math.ceil(kept * width)
            layer.gate.copy_(is_open.repeat(layer.groups))
            layer.index.copy_(torch.arange(layer.in_channels))
            layer.shifted.fill_(False)
        return self._counter.count()
