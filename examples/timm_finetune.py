"""Fine-tune a timm model, and bring it down to 75% of its multiply-adds on the way.

    python examples/timm_finetune.py [model]          # random weights: works offline
    python examples/timm_finetune.py [model] --pretrained

Pretrained weights have to be fetched; `convert` keeps them and the model's outputs as they are.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from digits import accuracy, batches

import selectconv as sc

EPOCHS = 4

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="test_resnet")
parser.add_argument("--pretrained", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
net = timm.create_model(options.model, pretrained=options.pretrained, num_classes=10, in_chans=1)
# The digits are 8x8: enlarged, so that the strides of a network for photographs leave something.
model = torch.nn.Sequential(torch.nn.Upsample(scale_factor=3), net)
example = torch.randn(2, 1, 8, 8)
with torch.no_grad():
    before = model.eval()(example)
    sc.convert(model, example)
    torch.testing.assert_close(model.eval()(example), before)
print(sc.describe(model))
optimizer = torch.optim.AdamW(sc.param_groups(model), lr=0.003, weight_decay=1e-2)
# Some slots are closed for good, others are re-allocated; mode="dealloc" would only close.
allocator = sc.ChannelAllocator(
    model, optimizer, total_epochs=EPOCHS, target_macs=0.75, example_input=example
)

start = accuracy(model)
for epoch in range(EPOCHS):
    for images, labels in batches():
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(allocator.step(epoch), f"- test accuracy {accuracy(model):.3f}")
print(f"test accuracy: {start:.3f} -> {accuracy(model):.3f}")
