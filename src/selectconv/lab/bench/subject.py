"""What is measured: a network, plain and selective, and a batch of images."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.allocate.optimizers import param_groups
from selectconv.core.models import selective_layers
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.estimate import reallocate
from selectconv.lab.train.network import build_model, check_network

# What was done to the layers that re-allocate.
KINDS = {
    "plain": "plain",
    "fresh": "selective, fresh",
    "moved": "20% of the slots re-allocated",
    "whole": "20% of the slots re-allocated by whole pixels",
    "closed": "50% of the slots closed",
}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True)
class Subject:
    """A network and its images.

    Attributes:
        model: the network, named as for `selectconv train --model`.
        image_size: height and width of its images.
        batch_size: images of a call.
    """

    model: str = "densenet40"
    image_size: int = 32
    batch_size: int = 64

    def draw_images(self, layout: str = "NCHW") -> Tensor:
        """Draw a batch of images in one of `LAYOUTS`."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator)
        return images.contiguous(memory_format=LAYOUTS[layout])

    def build_network(self, kind: str, layout: str = "NCHW") -> nn.Module:
        """Build the network; all kinds have the same weights.

        Args:
            kind: one of `KINDS`: which slots of the layers that re-allocate were moved or closed.
            layout: of its weights, one of `LAYOUTS`.
        """
        torch.manual_seed(0)
        method = "plain" if kind == "plain" else "select"
        config = resolve({"model": self.model, "method": method, "channels_last": False})
        info = dataset_info(config.data)
        info = replace(info, shape=(info.shape[0], self.image_size, self.image_size))
        check_network(config, info)
        model = build_model(config, info)
        generator = torch.Generator().manual_seed(0)
        for layer in (x for x in selective_layers(model).values() if x.shift is not None):
            if kind in ("moved", "whole"):
                layer.learns_shift = kind == "moved"
                reallocate(layer, 0.2, generator, "learned" if kind == "moved" else kind)
            elif kind == "closed":
                layer.close(torch.randperm(layer.in_channels, generator=generator)[::2])
        # nn.Module.to's overloads do not know memory_format.
        return model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload, no-any-return]


def training_step(
    model: nn.Module, images: Tensor, *, compile: bool = False
) -> Callable[[], object]:
    """Return a training step of a network on these images."""
    labels = torch.arange(len(images), device=images.device) % 10
    optimizer = torch.optim.SGD(
        param_groups(model), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    run = torch.compile(model) if compile else model

    def step() -> None:
        loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
