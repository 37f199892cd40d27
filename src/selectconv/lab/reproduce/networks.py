"""Small networks of other kinds than the zoo's, for the reduced grids: converted, not built in."""

from torch import Tensor, nn


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
