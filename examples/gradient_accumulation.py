"""Gradient accumulation: four micro-batches of 16 make one optimizer step.

The allocator steps once per epoch, after the last optimizer step. It may also come between two
micro-batches: what re-opened slots have gathered is cleared, all other gradients stay.
"""

import torch
import torch.nn.functional as F
from digits import TEST, accuracy, batches, small_cnn

import selectconv as sc

EPOCHS = 6
PARTS = 4

model = sc.convert(small_cnn(), TEST[0][:1])
optimizer = torch.optim.AdamW(sc.param_groups(model), lr=0.003, weight_decay=1e-2)
allocator = sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, gamma=0.1, grace=2)

start = accuracy(model)
for epoch in range(EPOCHS):
    for number, (images, labels) in enumerate(batches(16), start=1):
        loss = F.cross_entropy(model(images), labels) / PARTS
        loss.backward()
        if number % PARTS == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(allocator.step(epoch), f"- loss {PARTS * loss.item():.3f}")
print(f"test accuracy: {start:.3f} -> {accuracy(model):.3f}")
