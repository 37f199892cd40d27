"""Networks for measurements, named on the command line: `--model benchmarks.networks:unet`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers.append(nn.Conv2d(before, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four scales; each goes across to the same scale of the way up."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            _block(before, after)
            for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            _block(below + across, across)
            for below, across in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each class: the mean over the pixels."""
        across = []
        for block in self.down[:-1]:
            across.append(block(x))
            x = F.max_pool2d(across[-1], 2)
        x = self.down[-1](x)
        for block, beside in zip(self.up, across[::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), beside], dim=1))
        logits: Tensor = self.head(x).mean(dim=(2, 3))
        return logits


def unet(num_classes: int, in_channels: int) -> nn.Module:
    """Build a U-Net of 32 to 256 channels."""
    return UNet(num_classes, in_channels)
