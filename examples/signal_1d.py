"""A 1-D CNN that tells noisy waves apart: sine, square, sawtooth and two tones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selectconv as sc

EPOCHS = 6
LENGTH = 128


def waves(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw waves of random kind, pitch and phase, with noise: (N, 1, LENGTH), and their kinds."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(4, (count,), generator=generator)
    pitch, phase = torch.rand(2, count, 1, generator=generator)
    cycles = torch.linspace(0, 1, LENGTH) * (2 + 4 * pitch) + phase
    sine = (2 * math.pi * cycles).sin()
    tones = (sine + (6 * math.pi * cycles).sin()) / 2
    kinds = torch.stack([sine, sine.sign(), 2 * (cycles % 1) - 1, tones])
    wave = kinds[kind, torch.arange(count)]
    return (wave + 0.5 * torch.randn(count, LENGTH, generator=generator)).unsqueeze(1), kind


def block(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv1d(inputs, outputs, 5, stride=2, padding=2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(outputs), nn.ReLU())


train_waves, train_kinds = waves(1500, seed=0)
test_waves, test_kinds = waves(500, seed=1)
torch.manual_seed(0)
model = nn.Sequential(
    block(1, 32),
    block(32, 32),
    block(32, 64),
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(64, 4),
)
sc.convert(model, test_waves[:1])
optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
allocator = sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, gamma=0.1, grace=2)


@torch.no_grad()
def test() -> float:
    model.eval()
    right = model(test_waves).argmax(dim=1) == test_kinds
    model.train()
    return right.float().mean().item()


start = test()
for epoch in range(EPOCHS):
    for part in torch.randperm(len(train_waves)).split(50):
        loss = F.cross_entropy(model(train_waves[part]), train_kinds[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(allocator.step(epoch), f"- test accuracy {test():.3f}")
print(f"test accuracy: {start:.3f} -> {test():.3f}")
