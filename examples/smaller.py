"""Bring a trained network down to half of its multiply-adds, beside Torch-Pruning if installed.

    python examples/smaller.py [FOLDER]   # small.safetensors and small.onnx go there

Both start from the same trained network and are fine-tuned for the same number of epochs.
"""

import copy
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from digits import TEST, accuracy, batches, small_cnn

import selectconv as sc
from selectconv.lab.bench.timing import in_turn, open_network

EPOCHS = 6
BATCH, IMAGE = TEST[0][:64], TEST[0][:1]


def train(model: torch.nn.Module, lr: float, **options: Any) -> None:
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=lr, momentum=0.9, weight_decay=1e-3)
    allocator = options and sc.ChannelAllocator(model, optimizer, total_epochs=EPOCHS, **options)
    model.train()
    for epoch in range(EPOCHS):
        for images, labels in batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if allocator:
            print(allocator.step(epoch))


torch.set_num_threads(1)
trained = small_cnn(width=32)
train(trained, lr=0.05)

model = sc.convert(copy.deepcopy(trained), IMAGE)
train(
    model, lr=0.01, mode="dealloc", granularity="filter", target_macs=0.5, example_input=IMAGE
)  # fmt: skip
small = sc.compress(model, IMAGE)
networks = {"trained": trained, "closed by filters": small}
(folder,) = sys.argv[1:] or ["."]
sc.save_compressed(small, f"{folder}/small.safetensors")
sc.export_onnx(small, f"{folder}/small.onnx", IMAGE)

if not find_spec("torch_pruning"):
    print("Torch-Pruning is left out: pip install '.[pruning]'")
else:
    import torch_pruning as tp

    networks["Torch-Pruning"] = pruned = copy.deepcopy(trained)
    pruner = tp.pruner.MagnitudePruner(
        pruned, IMAGE, tp.importance.MagnitudeImportance(), pruning_ratio=0.9,
        iterative_steps=100, ignored_layers=[pruned[-1]],
    )  # fmt: skip
    while sc.count(pruned, IMAGE).macs > 1.01 * sc.count(small, IMAGE).macs:
        pruner.step()
    train(pruned, lr=0.01)

with torch.no_grad():
    by_runtime = [
        in_turn(
            {
                name: partial(open_network(network.eval(), BATCH, runtime), BATCH)
                for name, network in networks.items()
            },
            repeats=15,
        )
        for runtime in ("eager", "onnxruntime")
    ]
print("| network | parameters | multiply-adds | eager | ONNX Runtime | accuracy |")
print("|---|---:|---:|---:|---:|---:|")
for name, network in networks.items():
    cost = sc.count(network, IMAGE)
    eager, onnx = (f"{1e3 * min(times[name]):.2f} ms" for times in by_runtime)
    figures = f"{cost.params:,} | {cost.macs:,} | {eager} | {onnx} | {accuracy(network):.1%}"
    print(f"| {name} | {figures} |")
