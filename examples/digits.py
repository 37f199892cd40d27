"""What some of the examples share: scikit-learn's 8x8 digits, a small CNN, and its accuracy."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

_digits = load_digits()
_images = torch.tensor(_digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
_labels = torch.tensor(_digits.target)
TRAIN = _images[:1400], _labels[:1400]
TEST = _images[1400:], _labels[1400:]


def small_cnn(width: int = 16) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    torch.manual_seed(0)
    return nn.Sequential(
        *block(1, width),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        *block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def batches(size: int = 64) -> list[tuple[Tensor, Tensor]]:
    """An epoch's shuffled batches."""
    images, labels = TRAIN
    return [(images[part], labels[part]) for part in torch.randperm(len(images)).split(size)]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    images, labels = TEST
    model.eval()
    device = next(model.parameters()).device
    right = model(images.to(device)).argmax(dim=1).cpu() == labels
    model.train()
    return right.float().mean().item()
