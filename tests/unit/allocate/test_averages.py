"""An average of the weights that is no follower is noticed; other copies are left alone."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import selectconv as sc
from tiny_models import conv_net, images


def average(ema, model, *, by_data=False):
    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            (old.data if by_data else old).lerp_(new, 0.5)


def train(model, *, zero=False):
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, weight_decay=1e-4)
    model(images()[0]).square().mean().backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()


def steps(model, allocator, update):
    for epoch in range(3):
        train(model)
        update()
        allocator.step(epoch)


@pytest.mark.parametrize("kind", ["in place", "by data", "torch's"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_average_that_is_no_follower_is_noticed_once(kind, when):
    model = conv_net()
    copied = AveragedModel if kind == "torch's" else copy.deepcopy
    ema = copied(model) if when == "before" else None
    allocator = sc.ChannelAllocator(model, total_epochs=8)
    ema = ema or copied(model)

    def update():
        if kind == "torch's":
            ema.update_parameters(model)
        else:
            average(ema, model, by_data=kind == "by data")

    with pytest.warns(sc.SelectConvWarning, match="not among `followers`") as caught:
        steps(model, allocator, update)
    assert len(caught) == 1


def follow_another(model, other, ema):
    train(other)
    average(ema, other)


OTHERS = {
    "a snapshot": lambda model, other, ema: None,
    "no copy": lambda model, other, ema: average(other, model),
    "loaded anew": lambda model, other, ema: other.load_state_dict(model.state_dict()),
    "trained by itself": lambda model, other, ema: train(other),
    "trained by itself, gradients dropped": lambda model, other, ema: train(other, zero=True),
    "of another allocator": lambda model, other, ema: average(other, model),
    "a follower of another allocator": follow_another,
    "a follower": lambda model, other, ema: average(other, model),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_copies_are_left_alone(kind):
    model = conv_net()
    other = conv_net() if kind == "no copy" else copy.deepcopy(model)
    ema = copy.deepcopy(model)
    followers = [other] if kind == "a follower" else []
    allocator = sc.ChannelAllocator(model, total_epochs=8, followers=followers)
    if "allocator" in kind:
        sc.ChannelAllocator(other, total_epochs=8, followers=[ema])
    steps(model, allocator, lambda: OTHERS[kind](model, other, ema))
