"""Two real processes: rank 0 decides, and every rank ends with the same allocation.

One group of processes does everything, what must succeed and what must fail; each rank writes down
what it saw, and the tests compare the two.
"""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import selectconv as sc
from forked import spawn
from tiny_models import (
    allocation_of,
    assert_same,
    conv_net,
    images,
    outputs,
    select_layers,
    silence,
    train,
)

EPOCHS = 4


def same_model():
    """The same model on every rank, whatever the rank's random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return conv_net()


def state_of(model):
    return copy.deepcopy(dict(model.state_dict()))


def work(rank):
    return {
        "select": train_in_parallel(rank, "select"),
        "random": train_in_parallel(rank, "random"),
        "whole": train_in_parallel(rank, "select", shifts="whole"),
        "corrupted": recover_from_corruption(rank),
        "shift": draw_shifts(rank),
        "forward": broadcast_at_forward(rank),
        "budget": keep_a_budget(rank),
        "errors": disagree(rank),
    }


def keep_a_budget(rank):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = conv_net(width=64)
    if rank:  # would decide otherwise, were it asked
        with torch.no_grad():
            for layer in select_layers(model).values():
                layer.weight.copy_(torch.randn_like(layer.weight))
    allocator = sc.ChannelAllocator(
        model, total_epochs=2, stop_at=1.0, seed=rank, target_params=0.5,
        example_input=torch.zeros(1, 3, 8, 8),
    )  # fmt: skip
    reports = [allocator.step(epoch).plan.to_dict() for epoch in range(2)]
    return {
        "reports": reports,
        "allocation": allocation_of(model),
        "state": allocator.state_dict(),
        "params": sc.count(model, torch.zeros(1, 3, 8, 8)).params,
        "dense": allocator.budget.dense,
    }


def train_in_parallel(rank, mode, shifts="learned"):
    model = same_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
    follower = copy.deepcopy(model)
    allocator = sc.ChannelAllocator(
        wrapped, optimizer, total_epochs=EPOCHS, stop_at=1.0, gamma=0.3, mode=mode, seed=rank,
        followers=[follower], shifts=shifts,
    )  # fmt: skip
    epochs = []
    for epoch in range(EPOCHS):
        train(wrapped, optimizer, 2, seed=2 * epoch + rank)
        report = allocator.step(epoch)
        epochs.append(
            {
                "report": report.plan.to_dict(),
                "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
                "allocation": allocation_of(model),
                "follower": allocation_of(follower),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "allocator": allocator.state_dict(),
            }
        )
    return epochs


def recover_from_corruption(rank):
    """Rank 1 has lost its allocation; rank 0's next plan re-opens slots that rank 1 has open."""
    model = same_model()
    silence(model)
    allocator = sc.ChannelAllocator(model, total_epochs=4)
    allocator.dealloc()
    if rank == 1:
        for layer in select_layers(model).values():
            layer.gate.fill_(True)
            layer.index.fill_(5)
            layer.shifted.logical_not_()
            layer.shift.data.fill_(3.0)
    report = allocator.step(0)
    return {"report": report.reallocated, "state": state_of(model)}


def draw_shifts(rank):
    fresh = same_model()
    sc.ChannelAllocator(fresh, total_epochs=4, mode="shift", seed=rank)
    # A resumed run whose rank 0 alone has loaded the checkpoint.
    resumed = same_model()
    if rank == 0:
        resumed.load_state_dict(fresh.state_dict())
    sc.ChannelAllocator(resumed, total_epochs=4, mode="shift", seed=10 + rank)
    return {"fresh": state_of(fresh), "resumed": state_of(resumed)}


def broadcast_at_forward(rank):
    """DDP sends rank 0's buffers with each forward; what the layer computes must notice."""
    model = same_model()
    wrapped = DistributedDataParallel(model)
    before = outputs(model)
    model.conv1.close([0, 1] if rank == 0 else [2])
    own = outputs(model)
    wrapped(images(8)[0])  # in training mode, the same batch on both ranks
    return {"before": before, "own": own, "after": outputs(model), "state": state_of(model)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return spawn(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mode", ["select", "random", "whole"])
def test_ranks_with_other_data_and_seeds_train_to_the_same_bits(ranks, mode):
    first, second = (results[mode] for results in ranks)
    assert_same(second, first)
    moved = [epoch for epoch in first if epoch["report"]]
    assert len(moved) >= 2, "there was something to agree on"
    for epoch in first:
        assert_same(epoch["follower"], epoch["allocation"])
        if mode == "whole":
            shift = epoch["parameters"]["conv1.shift"]
            assert torch.equal(shift, shift.round())
            assert not torch.equal(shift, torch.zeros_like(shift))


def test_a_rank_that_lost_its_allocation_gets_rank_0s(ranks):
    first, second = (results["corrupted"] for results in ranks)
    assert first["report"].keys() == {"conv1", "conv2"}
    assert_same(second, first)
    assert first["state"]["conv1.gate"].all()
    assert first["state"]["conv1.index"].unique().numel() > 1


def test_shifts_are_those_of_rank_0(ranks):
    first, second = (results["shift"] for results in ranks)
    assert_same(second, first)
    assert first["fresh"]["conv1.shift"].unique().numel() > 1
    assert_same(first["resumed"], first["fresh"])


def test_a_budget_is_rank_0s(ranks):
    first, second = (results["budget"] for results in ranks)
    assert_same(second, first)
    assert all(first["reports"])
    assert any(layer["opened"] for layer in first["reports"][0].values())
    assert first["params"] == pytest.approx(0.5 * first["dense"], rel=0.01)


def test_ddps_own_broadcast_of_the_buffers_is_noticed(ranks):
    first, second = (results["forward"] for results in ranks)
    assert_same(second["before"], first["before"])
    assert not torch.equal(second["own"], first["own"])
    assert_same(second["state"], first["state"])
    assert (~second["state"]["conv1.gate"]).nonzero().flatten().tolist() == [0, 1]
    assert_same(second["after"], first["after"])


class Unaccountable(torch.nn.Module):
    """An activation that fails with an error of its own, on one rank only."""

    def forward(self, x):
        raise KeyError("no such activation")


def disagree(rank):
    model = same_model()
    silence(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=4)
    before = state_of(model)
    seen = {}

    weight = model.conv2.weight.detach()
    kept = weight[0, 0].clone()
    if rank == 0:
        weight[0, 0] = float("nan")
    seen["nan"] = message_of(allocator, 0)
    weight[0, 0] = kept

    source = model.conv1.mean_source
    if rank == 0:
        model.conv1.mean_source = None
    seen["no source"] = message_of(allocator, 0)
    if rank == 0:
        model.conv1.mean_source = sc.BatchNormMean(model.norm1, Unaccountable())
    seen["foreign"] = message_of(allocator, 0)
    model.conv1.mean_source = source

    assert_same(state_of(model), before)
    allocator.step(0)  # and on it goes
    seen["state"] = state_of(model)
    return seen


def message_of(allocator, epoch):
    try:
        allocator.step(epoch)
    except Exception as error:  # handed to the test, which looks at the type
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("nan", "AllocationError", "`conv2`: the layer's weights hold NaN"),
        ("no source", "MeanSourceError", "`conv1`: the layer does not know its input's mean"),
        ("foreign", "KeyError", "no such activation"),
    ],
)
def test_rank_0s_error_is_raised_on_every_rank(ranks, case, error, words):
    first, second = (results["errors"][case] for results in ranks)
    assert first.startswith(f"{error}: ")
    assert words in first
    assert second.startswith("AllocationError: rank 0: ")
    assert words in second


def test_after_an_error_the_ranks_still_agree(ranks):
    first, second = (results["errors"]["state"] for results in ranks)
    assert first["conv1.moved"].any()
    assert_same(second, first)
