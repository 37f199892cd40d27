"""An average of the weights (EMA) that follows the model's allocation.

A slot that the model re-allocates reads another channel from then on: averaged with its old weights
it would be nonsense. A follower gets the same plan, so its slot starts at zero with the model's.
"""

import copy

import torch
import torch.nn.functional as F
from digits import TEST, accuracy, batches, small_cnn

import selectconv as sc

EPOCHS = 6
DECAY = 0.95

model = sc.convert(small_cnn(), TEST[0][:1])
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
allocator = sc.ChannelAllocator(
    model, optimizer, total_epochs=EPOCHS, gamma=0.1, grace=2, followers=[ema]
)


@torch.no_grad()
def follow() -> None:
    """Average weights and batch norm's statistics; the allocation is for the allocator to copy."""
    averages, now = ema.state_dict(), model.state_dict()
    for name, average in averages.items():
        if average.is_floating_point():
            average.lerp_(now[name], 1 - DECAY)


start = accuracy(ema)
for epoch in range(EPOCHS):
    for images, labels in batches():
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow()
    print(allocator.step(epoch), f"- accuracy {accuracy(model):.3f}, average {accuracy(ema):.3f}")
    averages, now = ema.state_dict(), model.state_dict()
    assert all(torch.equal(averages[name], now[name]) for name in now if name.endswith("index"))
print(f"test accuracy: {start:.3f} -> {accuracy(ema):.3f}")
