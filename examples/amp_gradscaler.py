"""Mixed precision and gradient accumulation: four micro-batches of 16 make one optimizer step.

Autocast uses float16 on a GPU and bfloat16 on the CPU. The allocator steps once per epoch, after
`scaler.update()`. It may also come between two micro-batches: what re-opened slots have gathered is
cleared, all other gradients stay.
"""

import torch
import torch.nn.functional as F
from digits import TEST, accuracy, batches, small_cnn

import selectconv as sc

EPOCHS = 3
PARTS = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16

model = small_cnn().to(device, memory_format=torch.channels_last)
sc.convert(model, TEST[0][:1].to(device))
optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
allocator = sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, gamma=0.1, grace=2)
scaler = torch.amp.GradScaler(device)

start = accuracy(model)
for epoch in range(EPOCHS):
    for number, (images, labels) in enumerate(batches(16), start=1):
        with torch.autocast(device, dtype=dtype):
            inputs = images.to(device, memory_format=torch.channels_last)
            loss = F.cross_entropy(model(inputs), labels.to(device)) / PARTS
        scaler.scale(loss).backward()
        if number % PARTS == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    print(allocator.step(epoch), f"- scale {scaler.get_scale():.0f}")
print(f"test accuracy: {start:.3f} -> {accuracy(model):.3f}")
