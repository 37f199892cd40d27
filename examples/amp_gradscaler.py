"""Mixed precision: autocast and GradScaler, float16 on a GPU and bfloat16 on the CPU.

The allocator's step comes after `scaler.update()`, when no scaled gradient is waiting any more.
"""

import torch
import torch.nn.functional as F
from digits import TEST, accuracy, batches, small_cnn

import selectconv as sc

EPOCHS = 3
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16

model = small_cnn().to(device, memory_format=torch.channels_last)
sc.convert(model, TEST[0][:1].to(device))
optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
allocator = sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, gamma=0.1, grace=2)
scaler = torch.amp.GradScaler(device)

start = accuracy(model)
for epoch in range(EPOCHS):
    for images, labels in batches():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            inputs = images.to(device, memory_format=torch.channels_last)
            loss = F.cross_entropy(model(inputs), labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(allocator.step(epoch), f"- loss {loss.item():.3f}, scale {scaler.get_scale():.0f}")
print(f"test accuracy: {start:.3f} -> {accuracy(model):.3f}")
