"""Which slots stay so that every channel has a reader: for `gamma="auto"`.

A slot whose channel nobody else reads is worth more than its share of an output: without it the
filter that makes the channel is wasted, and all that only this filter reads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.checks import warn
from selectconv.core.layer import SelectConvNd
from selectconv.core.models import selective_layers
from selectconv.errors import CompressionError, naming
from selectconv.graph.channels import find_groups
from selectconv.graph.dataflow import trace_dataflow


def find_last_readers(model: nn.Module, example_input: Any) -> "LastReaders | None":
    """Find who reads each channel; None, with a warning: the model cannot be traced.

    A warning also says so if no slot can be closed.
    """
    try:
        found = LastReaders(model, example_input)
    except CompressionError as error:
        warn(f"`gamma` 'auto' does not know who else reads a channel: {error}")
        return None
    if found.keep_all():
        warn(
            "`gamma` 'auto' closes nothing here: each channel has a single reader. Give a number "
            "as `gamma`, and no reader is spared."
        )
    return found


class LastReaders:
    """Who reads the channels that only selective layers read; other readers never close theirs.

    Args:
        model: the model, without wrappers.
        example_input: as for `sc.count`.

    Raises:
        CompressionError: the model cannot be traced.
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        layers = selective_layers(model)
        # By layer, a number for each channel of its input, the same in all its readers; or -1.
        self._numbers = {
            name: torch.full((layer.in_channels,), -1, device="cpu")
            for name, layer in layers.items()
        }
        self._count = 0
        flow = trace_dataflow(model, example_input)
        for group in find_groups(flow, model, follows_moves=False).groups:  # to resume alike
            if group.readers and group.readers.keys() <= layers.keys():
                for name, channels in group.readers.items():
                    self._numbers[name][channels] = torch.arange(len(channels)) + self._count
                self._count += max(map(len, group.readers.values()))

    def keep_all(self) -> bool:
        """Return whether every slot is the only one that reads its channel: none can be closed."""
        numbers = torch.cat([*self._numbers.values()])
        return bool((numbers >= 0).all()) and len(numbers.unique()) == len(numbers)

    def find(self, layers: Mapping[str, SelectConvNd], damage: str) -> dict[str, Tensor]:
        """Return, by layer, the slots that stay, (I,) bool: of each channel the one of most weight.

        Args:
            layers: those of which slots may be closed.
            damage: as for `SelectConv2d.ecdm`.

        Raises:
            MeanSourceError: a layer does not know the mean of its input.
        """
        most = torch.zeros(self._count, device="cpu")
        found = {}
        for name, numbers in self._numbers.items():
            if name not in layers:  # it goes on reading
                most[numbers[numbers >= 0]] = torch.inf
                continue
            with naming(name):
                share = layers[name].ecdm(normalized=True, damage=damage).amax(dim=1).float().cpu()
            read = numbers[layers[name].index.cpu()]
            most.scatter_reduce_(0, read[read >= 0], share[read >= 0], "amax")
            found[name] = read, share
        return {
            name: (read >= 0) & (share >= torch.cat([most, most.new_zeros(1)])[read])
            for name, (read, share) in found.items()
        }
