"""`preview(gammas=...)` against steps that are carried out."""

import copy

import pytest
import torch
from torch import nn

import selectconv as sc

pytestmark = pytest.mark.filterwarnings("ignore:`gamma` 1 is above")
GAMMAS = [0.0, 0.01, 0.1, 0.5, 1.0]
X = torch.zeros(1, 3, 8, 8)


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 8, 1),
    )


@pytest.fixture
def model():
    return sc.convert(small_net(), X)


def test_each_row_is_what_a_step_at_that_gamma_does(model):
    before = copy.deepcopy(model.state_dict())
    allocator = sc.ChannelAllocator(model, total_epochs=2, example_input=X)
    table = allocator.preview(gammas=GAMMAS)
    for row, gamma in zip(table, GAMMAS, strict=True):
        other = copy.deepcopy(model)
        done = sc.ChannelAllocator(other, total_epochs=2, gamma=gamma, mode="dealloc").step(0)
        closed = done.deallocated
        assert row.gamma == gamma
        assert row.closed == sum(map(len, closed.values()))
        assert row.layers == len(closed)
        assert row.open == 16 + 24 - row.closed
        cost = sc.count(other, X)
        assert (row.macs, row.params) == (cost.macs, cost.params)
    assert table[0].closed == 0
    assert table[-1].closed == 38  # each layer keeps one
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_slots_in_their_grace_are_not_closed(model):
    allocator = sc.ChannelAllocator(model, total_epochs=8, gamma=0.3, grace=3)
    opened = sum(map(len, allocator.step(0).reallocated.values()))
    assert opened > 0
    free = sc.ChannelAllocator(model, total_epochs=8).preview(gammas=[1.0])
    assert allocator.preview(gammas=[1.0])[0].closed <= free[0].closed - opened + 2


def test_layers_that_have_seen_nothing_are_named():
    model = sc.convert(nn.Sequential(*small_net()[:5], nn.MaxPool2d(2), nn.Conv2d(24, 8, 1)), X)
    allocator = sc.ChannelAllocator(model, total_epochs=2, gamma=1.0)
    table, preview = allocator.preview(gammas=[1.0]), allocator.preview()
    assert table[0].closed == len(preview.deallocated["3"]) == 15
    assert preview.unknown == ("6",)
    for told in (table, preview):
        assert str(told).endswith("not known before the first batch: 6")
    model(torch.randn(2, 3, 8, 8))
    assert allocator.preview().unknown == ()


@pytest.mark.parametrize("gammas", [[2.0], ["a"], "auto", 3])
def test_gammas_that_are_not_accepted(model, gammas):
    wrong = gammas[0] if isinstance(gammas, list) else gammas
    with pytest.raises((TypeError, ValueError), match=f"`gammas`.*{wrong!r}"):
        sc.ChannelAllocator(model, total_epochs=2).preview(gammas=gammas)


def test_it_prints_a_table(model):
    table = sc.ChannelAllocator(model, total_epochs=2, example_input=X).preview(gammas=[0.1, 1])
    lines = str(table).splitlines()
    assert lines[0].split() == ["gamma", "closed", "layers", "open", "multiply-adds", "parameters"]
    assert lines[-1] == "of 40 slots in 2 layers"
    assert repr(table) == str(table)
    bare = sc.ChannelAllocator(model, total_epochs=2).preview(gammas=[0.5])
    assert (bare[0].macs, bare[0].params) == (None, None)
    assert str(bare).splitlines()[1].split()[-2:] == ["-", "-"]
