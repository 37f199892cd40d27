"""Train a small CNN on 8x8 digits with an ordinary loop; `selective_loop.py` is its twin."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

EPOCHS = 6

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
labels = torch.tensor(digits.target)
train_images, train_labels = images[:1400], labels[:1400]
test_images, test_labels = images[1400:], labels[1400:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def test() -> float:
    model.eval()
    with torch.no_grad():
        answers = model(test_images).argmax(dim=1)
    return (answers == test_labels).float().mean().item()


start = test()
for epoch in range(EPOCHS):
    model.train()
    for batch in torch.randperm(len(train_images)).split(64):
        loss = F.cross_entropy(model(train_images[batch]), train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: test accuracy {test():.3f}")
print(f"test accuracy: {start:.3f} -> {test():.3f}")
