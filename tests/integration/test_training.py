"""Real training of tiny networks: every kind of loop, resuming, averaging, and the cost of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import selectconv as sc
from selectconv.core.allocation import ReallocRule
from tiny_models import (
    assert_same,
    conv_net,
    dense_net,
    images,
    select_layers,
    silence,
    weights_of,
)

EPOCHS = 8
BATCHES = 4
# Guessing costs log(4) = 1.39. A loss of 0.5 means more than 60 % of the probability on the right
# class; in a dozen seeds no variant ended above 0.4 or began below 1.2.
LEARNED = 0.5


def setup(build=conv_net, **arguments):
    model = build()
    optimizer = torch.optim.SGD(
        sc.param_groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    allocator = sc.ChannelAllocator(
        model, optimizer, **{"total_epochs": EPOCHS, "gamma": 0.2, **arguments}
    )
    return model, optimizer, allocator


def train_epoch(model, optimizer, epoch, *, dtype=None, layout=None, parts=1):
    """A plain loop: no scaler, no wrapper; `parts` micro-batches make one optimizer step."""
    model.train()
    total = 0.0
    for batch in range(BATCHES):
        x, labels = images(32, seed=BATCHES * epoch + batch)
        x = x if layout is None else x.contiguous(memory_format=layout)
        optimizer.zero_grad()
        for x_part, labels_part in zip(x.chunk(parts), labels.chunk(parts), strict=True):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(x_part), labels_part) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
    return total / BATCHES


@pytest.mark.parametrize("build", [conv_net, dense_net])
@pytest.mark.parametrize(
    "loop",
    [{}, {"dtype": torch.bfloat16}, {"layout": torch.channels_last}, {"parts": 2}],
    ids=["plain", "bfloat16", "channels_last", "accumulation"],
)
def test_a_net_learns_while_its_slots_move(build, loop):
    model, optimizer, allocator = setup(build)
    if "layout" in loop:
        model.to(memory_format=loop["layout"])
    losses, moved = [], 0
    for epoch in range(EPOCHS):
        losses.append(train_epoch(model, optimizer, epoch, **loop))
        moved += sum(map(len, allocator.step(epoch).reallocated.values()))
    assert losses[-1] < LEARNED < losses[0]
    assert moved >= 3
    for layer in select_layers(model).values():
        slots = layer.moved.nonzero().flatten().tolist()
        if slots:  # what was re-opened with zeros has learned something since
            assert weights_of(layer, slots).abs().amax(dim=(0, 2, 3)).min() > 0


def test_training_on_after_a_restart_gives_the_same_bits(tmp_path):
    model, optimizer, allocator = setup(stop_at=1.0)
    reports = []
    for epoch in range(EPOCHS):
        train_epoch(model, optimizer, epoch)
        reports.append(allocator.step(epoch).plan.to_dict())
        if epoch == 2:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "allocator": allocator.state_dict(),
                },
                tmp_path / "last.ckpt",
            )
    assert any(reports[:3])
    assert any(reports[3:]), "there was something to continue"

    torch.manual_seed(99)
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    resumed, resumed_optimizer, resumed_allocator = setup(stop_at=1.0, seed=5)
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    resumed_allocator.load_state_dict(loaded["allocator"])
    for epoch in range(3, EPOCHS):
        train_epoch(resumed, resumed_optimizer, epoch)
        assert resumed_allocator.step(epoch).plan.to_dict() == reports[epoch]
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert_same(resumed_optimizer.state_dict(), optimizer.state_dict())
    assert_same(resumed_allocator.state_dict(), allocator.state_dict())


class OperationCounter(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations_of_an_allocation(channels, mode, damage):
    layer = sc.SelectConv2d(channels, 32, 1)
    model = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), layer)
    layer.mean_source = sc.BatchNormMean(model[0], torch.relu)
    silent = silence(model, fraction=1 / 3)["2"]
    rule = ReallocRule(max_copies=None, init="random" if mode == "random" else "zero")
    with OperationCounter() as counter:
        plan = layer.plan(gamma=1e-3, rule=rule, damage=damage, generator=torch.Generator())
        layer.apply_plan(plan)
    assert plan.opened.tolist() == silent
    return counter.count


@pytest.mark.parametrize("mode", ["select", "random"])
@pytest.mark.parametrize("damage", ["mean", "rms"])
def test_an_allocation_has_no_loop_over_channels(mode, damage):
    # DenseNet-BC-190 has layers of more than 2000 inputs and hundreds of slots to re-open.
    narrow = operations_of_an_allocation(64, mode, damage)
    wide = operations_of_an_allocation(512, mode, damage)
    assert 10 < narrow == wide
