"""A small selective training on drawn shapes: watch channels being de- and re-allocated.

    python examples/demo.py [--epochs 12] [--gamma 0.05] [--seed 0]

The images are drawn here, so nothing is downloaded. gamma is larger than the paper's 0.001: at this
size nothing would move in the first epochs otherwise.
"""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import selectconv as sc

SIZE = 16
SHAPES = ("disc", "ring", "square", "frame", "cross", "diagonal")
BATCH = 64


def draw_shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw noisy shapes of random place and size: images (N, 1, 16, 16) and their classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=count)
    centre = rng.uniform(6, SIZE - 7, size=(2, count, 1, 1))
    radius = rng.uniform(3, 5.5, size=(count, 1, 1))
    rows, columns = np.mgrid[:SIZE, :SIZE]
    dy, dx = rows - centre[0], columns - centre[1]
    distance, box = np.hypot(dy, dx), np.maximum(abs(dy), abs(dx))
    masks = np.stack(
        [
            distance < radius,
            abs(distance - radius) < 1,
            box < radius,
            abs(box - radius) < 1,
            (np.minimum(abs(dy), abs(dx)) < 1) & (box < radius),
            (abs(abs(dy) - abs(dx)) < 1) & (box < radius),
        ]
    )
    images = masks[labels, np.arange(count)] + rng.normal(0, 0.6, size=(count, SIZE, SIZE))
    return torch.tensor(images, dtype=torch.float32)[:, None], torch.tensor(labels)


def error_rate(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    """Compute the share of wrong answers, in per cent."""
    model.eval()
    with torch.no_grad():
        wrong = sum(
            int((model(x).argmax(1) != y).sum())
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    return 100 * wrong / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--gamma", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.epochs < 1 or not 0 <= options.gamma <= 1:
        parser.error("--epochs must be at least 1 and --gamma in [0, 1]")

    torch.manual_seed(options.seed)
    images, labels = draw_shapes(4000, seed=1)
    test_images, test_labels = draw_shapes(1000, seed=2)
    model = sc.create_model(
        "densenet40", growth_rate=6, units=(3, 3, 3), in_channels=1, num_classes=6, selective=True
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"A small DenseNet ({parameters:,} parameters) on {len(images):,} drawn shapes,")
    print(f"{options.epochs} epochs, selection in the first half with gamma {options.gamma}")
    print()

    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    allocator = sc.ChannelAllocator(
        model, optimizer, total_epochs=options.epochs, gamma=options.gamma, grace=2
    )
    print("epoch   loss   test error   de-allocated   re-allocated   error after that   seconds")
    for epoch in range(options.epochs):
        started = time.perf_counter()
        model.train()
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        schedule.step()
        error = error_rate(model, test_images, test_labels)
        report = allocator.step(epoch)
        error_after = error_rate(model, test_images, test_labels)
        closed = sum(map(len, report.deallocated.values()))
        opened = sum(map(len, report.reallocated.values()))
        print(
            f"{epoch:5d} {total / len(images):6.3f} {error:10.1f} % {closed:14d} {opened:14d}"
            f" {error_after:16.1f} % {time.perf_counter() - started:9.1f}"
        )

    print()
    print("Re-allocated slots and what they read now: slot<-channel (shift in rows, columns)")
    for name, layer in allocator.layers.items():
        moved = (layer.moved & layer.gate).nonzero().flatten().tolist()
        if layer.shift is None or not moved:
            continue
        shifts = layer.shift.tolist()
        shown = ", ".join(
            f"{slot}<-{int(layer.index[slot])} ({shifts[slot][0]:+.1f}, {shifts[slot][1]:+.1f})"
            for slot in moved[:4]
        )
        more = f", and {len(moved) - 4} more" if len(moved) > 4 else ""
        print(f"  {name}: {shown}{more}")
    print()
    print(str(sc.describe(model)).splitlines()[-1])


if __name__ == "__main__":
    main()
