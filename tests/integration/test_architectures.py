"""`sc.convert` on networks of timm and torchvision: unchanged, selective, trainable, movable."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from architectures import ARCHITECTURES, CLASSES
from tiny_models import select_layers

IMAGES = 2
# A conv may sum in another order once its input was copied; what is claimed is rtol 1e-5.
RTOL = 1e-5
# Of the eligible convs; of the silent slots; of the range of the outputs.
SELECTIVE, REALLOCATED, CHANGED = 0.8, 0.85, 0.02
SILENCED = 5  # every fifth slot
# Deep maps have 8 values a channel here: far from normal, yet 0.97 was the lowest. Channels in
# another order would have none.
CORRELATION = 0.95


def images(side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(IMAGES, 3, side, side, generator=generator)


def outputs(model, x):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        y = model(x)
    model.train(was_training)
    return y


def eligible(model, x):
    """Names of the convs that the contract calls eligible, found anew with hooks."""
    larger = set()

    def watch(conv, inputs):
        if max(inputs[0].shape[2:]) > 1 and inputs[0].data_ptr() != x.data_ptr():
            larger.add(conv)

    convs = {name: m for name, m in model.named_modules() if type(m) is nn.Conv2d}
    handles = [conv.register_forward_pre_hook(watch) for conv in convs.values()]
    outputs(model, x)
    for handle in handles:
        handle.remove()
    return {
        name
        for name, conv in convs.items()
        if conv in larger and conv.in_channels >= 8 and conv.groups != conv.in_channels
    }


def train(model, optimizer, side, steps):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images(side, seed=step)), torch.arange(IMAGES) % CLASSES)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.tensor(losses).isfinite().all()


def silence(layer):
    """Scale the weights of every fifth slot by 1e-9; return which. Never a whole group."""
    width = layer.in_channels // layer.groups
    slots = torch.arange(1, layer.in_channels, SILENCED) if width > 1 else torch.arange(0)
    with torch.no_grad():
        weight = layer.weight.view(layer.groups, -1, *layer.weight.shape[1:])
        weight[slots // width, :, slots % width] *= 1e-9
    return slots.tolist()


def assert_closed_forms_follow_the_inputs(model, x):
    """Compare them with the means of real inputs, after norms that tell channels apart."""
    layers = {
        name: layer
        for name, layer in select_layers(model).items()
        if not isinstance(layer.mean_source, sc.ObservedMean)
    }
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(bn.weight, 0.5, 1.5)
            nn.init.uniform_(bn.bias, -1, 1)
    seen = {}
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda own, inputs: seen.update({own: inputs[0].detach()}))
    model.train()(x)
    for name, layer in layers.items():
        means = torch.stack([seen[layer].mean((0, 2, 3)), layer.input_mean()])
        assert torch.corrcoef(means)[0, 1] > CORRELATION, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name):
    architecture = ARCHITECTURES[name]
    model = architecture.create()
    x = images(architecture.side)
    plain, wanted = outputs(model, x), eligible(model, x)

    assert sc.convert(model, x) is model
    torch.testing.assert_close(outputs(model, x), plain, rtol=RTOL, atol=1e-7)
    layers = select_layers(model)
    assert len(wanted & set(layers)) >= SELECTIVE * len(wanted)
    assert wanted
    rows = sc.describe(model)
    assert {row.name for row in rows if row.skipped is None} == set(layers)

    optimizer = torch.optim.SGD(sc.param_groups(model), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    # No cap on copies: with 32 of them three sources serve 99 slots, and a fifth may be more.
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=10, gamma=1e-5, max_copies=None)
    model.train()
    for layer in layers.values():
        silence(layer)
    train(model, optimizer, architecture.side, steps=2)
    silent = {key: silence(layer) for key, layer in layers.items()}  # they have learned a little
    before = outputs(model, x)
    report = allocator.step(0)
    moved = {key: set(report.reallocated.get(key, [])) for key in layers}
    count = sum(map(len, silent.values()))
    assert sum(len(moved[key] & set(silent[key])) for key in layers) >= REALLOCATED * count
    change = (outputs(model, x) - before).abs().max()
    assert change < CHANGED * (before.max() - before.min())

    copies = copy.deepcopy(model), sc.convert(architecture.create(), x)
    copies[1].load_state_dict(model.state_dict())
    for clone in copies:
        assert torch.equal(outputs(clone, x), outputs(model, x))
        own = {id(module) for module in clone.modules()}
        for layer in select_layers(clone).values():
            assert {id(bn) for bn in layer.mean_source.batch_norms()} <= own

    train(model, optimizer, architecture.side, steps=1)
    assert not torch.equal(outputs(model, x), outputs(copies[0], x))
    assert all(layer.weight.isfinite().all() for layer in layers.values())
    assert all(layer.gate.sum() >= 1 for layer in layers.values())
    assert_closed_forms_follow_the_inputs(sc.convert(architecture.create(), x), x)
