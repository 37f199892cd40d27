"""An average of the weights that is no follower is noticed; other copies are left alone."""

import copy
import pickle
import warnings

import pytest
import torch

import selectconv as sc
from tiny_models import conv_net, images


def average(ema, model, *, by_data=False):
    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            (old.data if by_data else old).lerp_(new, 0.5)


def train(model):
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, weight_decay=1e-4)
    model(images()[0]).square().mean().backward()
    optimizer.step()


def steps(model, allocator, update, number=3):
    for epoch in range(number):
        train(model)
        update()
        allocator.step(epoch)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_average_that_is_no_follower_is_noticed_once(by_data, when):
    model = conv_net()
    ema = copy.deepcopy(model) if when == "before" else None
    allocator = sc.ChannelAllocator(model, total_epochs=8)
    ema = ema or copy.deepcopy(model)
    with pytest.warns(sc.SelectConvWarning, match="not among `followers`") as caught:
        steps(model, allocator, lambda: average(ema, model, by_data=by_data))
    assert len(caught) == 1


def test_torchs_average_is_noticed():
    model = conv_net()
    ema = torch.optim.swa_utils.AveragedModel(model)
    allocator = sc.ChannelAllocator(model, total_epochs=8)
    with pytest.warns(sc.SelectConvWarning, match="not among `followers`") as caught:
        steps(model, allocator, lambda: ema.update_parameters(model))
    assert len(caught) == 1


OTHERS = {
    "a follower": lambda model, other: average(other, model),
    "a snapshot": lambda model, other: None,
    "a snapshot that is loaded anew": lambda model, other: other.load_state_dict(
        model.state_dict()
    ),
    "trained by itself": lambda model, other: train(other),
    "of another allocator": lambda model, other: average(other, model),
    "unpickled": lambda model, other: average(other, model),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_copies_are_left_alone(kind):
    model = conv_net()
    other = pickle.loads(pickle.dumps(model)) if kind == "unpickled" else copy.deepcopy(model)
    followers = [other] if kind == "a follower" else []
    if kind == "of another allocator":
        sc.ChannelAllocator(other, total_epochs=8)
    allocator = sc.ChannelAllocator(model, total_epochs=8, followers=followers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, allocator, lambda: OTHERS[kind](model, other))
    assert [str(warning.message) for warning in caught] == []
