"""Small networks of other kinds than the zoo's, for the reduced grids: converted, not built in."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from selectconv.lab.zoo import create_model


class InvertedResidual(nn.Module):
    """MobileNetV2's block: 1x1 to `expansion` times the channels, depthwise 3x3, 1x1 back."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = expansion * in_channels
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.is_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Compute new features, added to the old ones where they have the same shape."""
        y: Tensor = self.layers(x)
        return x + y if self.is_residual else y


def small_mobilenet(
    num_classes: int, in_channels: int, *, width: int = 16, expansion: int = 4
) -> nn.Sequential:
    """Build a MobileNetV2-like network for images of 16x16, with maps of 16x16 and 8x8."""
    wide, last = 3 * width // 2, 6 * width
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
        InvertedResidual(width, width, 1, expansion),
        InvertedResidual(width, width, 1, expansion),
        InvertedResidual(width, wide, 2, expansion),
        InvertedResidual(wide, wide, 1, expansion),
        InvertedResidual(wide, wide, 1, expansion),
        nn.Conv2d(wide, last, 1, bias=False),
        nn.BatchNorm2d(last),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(last, num_classes),
    )


def depthwise_densenet(
    num_classes: int, in_channels: int, *, growth_rate: int = 8, units: Sequence[int] = (3, 3)
) -> nn.Module:
    """Build the small DenseNet with a depthwise 3x3 before each 1x1: what shifts do, for all slots.

    The depthwise convs start as the identity, so that it starts where the DenseNet starts.
    """
    model = create_model(
        "densenet40",
        num_classes=num_classes,
        in_channels=in_channels,
        growth_rate=growth_rate,
        units=units,
    )
    for module in list(model.modules()):
        conv = getattr(module, "conv", None)
        if isinstance(conv, nn.Conv2d) and conv.kernel_size == (1, 1):
            width = conv.in_channels
            depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
            nn.init.dirac_(depthwise.weight, groups=width)
            module.conv = nn.Sequential(depthwise, conv)
    return model


class BasicBlock(nn.Module):
    """ResNet's block of two 3x3 convs; where its shape changes, the shortcut is a 1x1 conv."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Sequential()
        if in_channels != out_channels:
            self.shortcut.append(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(out_channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add new features to the old ones."""
        y: Tensor = self.relu(self.layers(x) + self.shortcut(x))
        return y


def resnet20(num_classes: int, in_channels: int, *, width: int = 16) -> nn.Sequential:
    """Build ResNet-20 for images of 32x32: three blocks each of `width`, 2 and 4 times `width`."""
    widths = [width, *(width * 2**stage for stage in range(3) for _ in range(3))]
    blocks = [
        BasicBlock(before, after, 1 if before == after else 2) for before, after in pairwise(widths)
    ]
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )
