"""Budgets: gamma is solved for, so that a training ends at a part of the dense model's cost."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.allocate.budget import FLOOR, ClosingQueue
from selectconv.allocate.decision import (
    CLOSE_ONLY,
    CLOSED_SHARE,
    MOST,
    SHARE,
    share_of_slots,
    solve_gammas,
)
from selectconv.allocate.settings import Settings
from selectconv.core.allocation import choose_dealloc
from tiny_models import assert_same, conv_net, select_layers, snapshot, train

IMAGES = torch.zeros(1, 3, 8, 8)
WITHIN = 0.01


def dense_net(**more):
    """Wide enough that a slot is well below a hundredth of the cost."""
    return sc.create_model(
        "densenet40", growth_rate=8, units=(2, 2, 2), num_classes=4, selective=True, **more
    )


pointwise_net = partial(dense_net, realloc="pointwise-only")


def setup(mode="dealloc", epochs=8, build=dense_net, train_first=True, **arguments):
    model = build()
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if train_first:
        train(model, optimizer, steps=2)
    allocator = sc.ChannelAllocator(
        model, optimizer, total_epochs=epochs, mode=mode, example_input=IMAGES, **arguments
    )
    return model, optimizer, allocator


def ratio(model, name, dense):
    cost = sc.count(model, IMAGES)
    return (cost.macs if name == "target_macs" else cost.params) / dense


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        ("dealloc", {"target_macs": 0.5}),
        ("dealloc", {"target_params": 0.35}),
        ("select", {"target_macs": 0.5}),
        ("zero", {"target_params": 0.35}),
        ("random", {"target_macs": 0.5}),
    ],
)
def test_a_training_ends_at_its_target(mode, target):
    [(name, fraction)] = target.items()
    model, optimizer, allocator = setup(mode, epochs=6, **target)
    cost = sc.count(model, IMAGES)
    dense = cost.macs if name == "target_macs" else cost.params
    opened = 0
    for epoch in range(6):
        train(model, optimizer, steps=1, seed=epoch)
        report = allocator.step(epoch)
        opened += sum(map(len, report.reallocated.values()))
        # Never above the epoch's budget by more than a slot or two; before the last of them, all
        # that is read counts.
        read = sc.CostCounter(model, IMAGES).count(is_exact=epoch < 2)
        read = read.macs if name == "target_macs" else read.params
        assert read <= allocator.budget.at(epoch) + WITHIN * dense
        said = "no step" if report.is_over else f"; {ratio(model, name, dense):.1%} of the "
        assert said in str(report)
        for layer in select_layers(model).values():
            assert int(layer.gate.sum()) >= math.ceil(FLOOR * layer.in_channels)
    assert ratio(model, name, dense) == pytest.approx(fraction, rel=WITHIN)
    assert (opened > 0) == (mode != "dealloc")


def test_a_falling_budget_closes_about_as_many_slots_at_each_step():
    """Closing a few slots saves nothing by `count`, since gathering the others would not pay."""
    allocator = setup(target_macs=0.85, epochs=16, build=pointwise_net)[2]
    closed = [sum(map(len, allocator.step(epoch).deallocated.values())) for epoch in range(8)]
    assert max(closed) < 2 * sum(closed) / len(closed)


@pytest.mark.parametrize("shifts", ["learned", "whole"])
def test_with_a_target_of_the_dense_cost_slots_move_and_nothing_gets_dearer(shifts):
    model, optimizer, allocator = setup(
        "select", build=pointwise_net, target_macs=1.0, gamma=0.05, shifts=shifts
    )
    for epoch in range(8):
        train(model, optimizer, steps=1, seed=epoch)
        allocator.step(epoch)
        assert sc.count(model, IMAGES).macs <= (1 + WITHIN) * allocator.budget.dense
    if shifts == "whole":  # these cost nothing: every slot is used
        layers = select_layers(model).values()
        assert any(bool(layer.moved.any()) for layer in layers)
        assert all(bool(layer.gate.all()) for layer in layers)


def test_the_budget_falls_in_a_line_over_the_acting_epochs():
    _, _, allocator = setup(target_macs=0.4, epochs=10)
    budget = allocator.budget
    at = [budget.at(epoch) / budget.dense for epoch in range(7)]
    assert at == pytest.approx([0.88, 0.76, 0.64, 0.52, 0.4, 0.4, 0.4])


def test_one_gamma_per_saved_cost_closes_what_algorithm_1_closes():
    model, _, allocator = setup(target_macs=0.7, epochs=2, stop_at=0.5)
    layers = select_layers(model)
    necdm = {name: layer.ecdm(normalized=True) for name, layer in layers.items()}
    queue = ClosingQueue(layers, "auto", {}, allocator.budget.saved)
    closed = allocator.step(0).deallocated
    gamma = float(queue.levels[sum(map(len, closed.values())) - 1])  # per multiply-add
    assert 0 < gamma < 1
    for name, layer in layers.items():
        assert (~layer.gate).nonzero().flatten().tolist() == closed.get(name, [])
        own = gamma * allocator.budget.saved[name] * (1 + 1e-12)  # but for rounding
        chosen = choose_dealloc(necdm[name], own).tolist()
        at_floor = int(layer.gate.sum()) == math.ceil(FLOOR * layer.in_channels)
        assert closed.get(name, []) == chosen or (at_floor and set(closed[name]) < set(chosen))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_queue_agrees_with_algorithm_1_at_every_gamma(groups):
    conv = sc.SelectConv2d(24, 8, 1, groups=groups, bias=False)
    norm = nn.BatchNorm2d(24)
    nn.init.uniform_(norm.weight)
    conv.mean_source = sc.BatchNormMean(norm, torch.relu)
    conv.close([3, 20])
    queue = ClosingQueue({"conv": conv}, "mean", {})
    assert len(queue.levels) == 22 - groups * math.ceil(FLOOR * (24 // groups))
    assert bool((queue.levels.diff() >= 0).all())
    necdm = conv.ecdm(normalized=True)
    for number in range(1, len(queue.levels)):
        chosen = choose_dealloc(necdm, float(queue.levels[number - 1]) + 1e-9).tolist()
        ours = sorted([3, 20, *queue.plans(range(number))["conv"].closed.tolist()])
        # Of two groups, one at its floor leaves slots out that the other passes.
        assert ours == chosen if groups == 1 else len(ours) <= len(chosen) + 1


def test_protected_slots_and_the_floor_stay_open():
    conv = sc.SelectConv2d(20, 8, 1, bias=False)
    conv.mean_source = sc.BatchNormMean(nn.BatchNorm2d(20), torch.relu)
    is_protected = torch.zeros(20, dtype=torch.bool).index_fill(0, torch.tensor([1, 4]), True)

    def queued(protected):
        return ClosingQueue({"conv": conv}, "mean", protected).slots.tolist()

    assert len(queued({})) == 18
    assert sorted(queued({"conv": is_protected})) == [n for n in range(20) if n not in (1, 4)]
    conv.close(range(5, 20))
    assert len(queued({})) == len(queued({"conv": is_protected})) == 3
    conv.close([0, 2, 3])
    assert queued({"conv": is_protected}) == []


@pytest.mark.filterwarnings("ignore:`optimizer` has not stepped")
def test_a_preview_and_a_failed_step_change_nothing():
    model, optimizer, allocator = setup("select", target_macs=0.5)
    before = snapshot(model, optimizer, allocator)
    report = allocator.preview()
    assert report
    assert_same(snapshot(model, optimizer, allocator), before)
    assert allocator.step(0).plan.to_dict() == report.plan.to_dict()
    layer = next(iter(select_layers(model).values()))
    layer.weight.detach()[0, 0] = float("nan")
    before = snapshot(model, optimizer, allocator)
    with pytest.raises(sc.AllocationError, match="NaN or infinite"):
        allocator.step(1)
    assert_same(snapshot(model, optimizer, allocator), before)


def test_resumed_in_the_middle_it_decides_the_same():
    def run(parts, epochs):
        model, optimizer, allocator = parts
        plans = []
        for epoch in epochs:
            train(model, optimizer, steps=2, seed=epoch)
            plans.append(allocator.step(epoch).plan.to_dict())
        return plans

    parts = setup("select", train_first=False, target_macs=0.5, seed=3)
    run(parts, range(2))
    middle = [copy.deepcopy(part.state_dict()) for part in parts]
    rest = run(parts, range(2, 8))
    model, optimizer, _ = setup("select", train_first=False)
    model.load_state_dict(middle[0])
    optimizer.load_state_dict(middle[1])
    # As a trainer does: the allocator is built on the loaded model.
    allocator = sc.ChannelAllocator(
        model, optimizer, total_epochs=8, example_input=IMAGES, target_macs=0.5, seed=9
    )
    allocator.load_state_dict(middle[2])
    assert run((model, optimizer, allocator), range(2, 8)) == rest != []
    assert_same(dict(model.state_dict()), dict(parts[0].state_dict()))
    assert_same(allocator.state_dict(), parts[2].state_dict())


def test_shifts_that_grow_later_do_not_pass_the_target():
    model, optimizer, allocator = setup("select", target_macs=0.6, grace=1)
    for epoch in range(4):
        train(model, optimizer, steps=2, seed=epoch)
        allocator.step(epoch)
    dense = allocator.budget.dense
    moved = [m for m in select_layers(model).values() if bool((m.moved & m.gate).any())]
    assert moved, "the test needs slots that stay re-opened"
    for layer in moved:
        layer.shift.detach().mul_(2.5)
    assert ratio(model, "target_macs", dense) > 0.6 * (1 + WITHIN)
    report = allocator.step(4)
    assert report.deallocated
    assert not report.reallocated
    assert ratio(model, "target_macs", dense) == pytest.approx(0.6, rel=WITHIN)


def test_on_demand_the_users_gamma_holds():
    model, _, allocator = setup(target_macs=0.5, gamma=0.0)
    assert not allocator.dealloc()
    assert all(bool(layer.gate.all()) for layer in select_layers(model).values())


def test_where_slots_are_reopened_at_least_those_of_the_users_gamma_are_closed():
    model, _, allocator = setup("select", target_macs=0.95, gamma=0.3)
    levels = ClosingQueue(select_layers(model), "auto", {}).levels
    closed = sum(map(len, allocator.step(0).deallocated.values()))
    assert closed == int((levels <= 0.3).sum()) > 0


def test_a_slot_that_is_too_dear_is_passed_over():
    """A slot of the 3x3 conv is more than a hundredth of this model, one of the 1x1 conv is not."""
    model, optimizer, allocator = setup(
        "dealloc", build=lambda: conv_net(width=64), target_params=0.5
    )
    dense = sc.count(model, IMAGES).params
    for epoch in range(8):
        train(model, optimizer, steps=1, seed=epoch)
        allocator.step(epoch)
    assert ratio(model, "target_params", dense) == pytest.approx(0.5, rel=WITHIN)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target_macs": 0.5, "target_params": 0.5}, ValueError, "cannot be combined"),
        (
            {"target_params": 0},
            ValueError,
            "`target_params` must be a number above 0 and at most 1, got 0",
        ),
        ({"target_macs": -0.5}, ValueError, "`target_macs`.*-0.5"),
        ({"target_macs": "half"}, TypeError, "'half'"),
        ({"target_macs": 0.5, "example_input": None}, ValueError, "needs an `example_input`"),
        ({"target_macs": 0.5, "mode": "shift"}, ValueError, "`mode` that closes.*'shift'"),
        ({"target_macs": 0.5, "mode": "none"}, ValueError, "`mode` that closes.*'none'"),
        ({"target_macs": 0.5, "stop_at": 0.0}, ValueError, r"`stop_at` above 0.*0\.0"),
        ({"target_macs": 0.5, "gamma": "auto"}, ValueError, "a number as `gamma`.*'auto'"),
        ({"target_macs": 0.01}, ValueError, r"cannot be reached: .* the closest is 0\.\d+"),
        (
            {"target_macs": 0.5, "example_input": torch.zeros(1, 5, 8, 8)},
            sc.CompressionError,
            "`example_input`",
        ),
    ],
)
def test_wrong_targets_are_refused(arguments, error, message):
    model = dense_net()
    options = {"total_epochs": 8, "example_input": IMAGES, **arguments}
    with pytest.raises(error, match=message):
        sc.ChannelAllocator(model, **options)
    assert all(bool(layer.gate.all()) for layer in select_layers(model).values())


@pytest.mark.parametrize("mode", ["dealloc", "select"])
@pytest.mark.parametrize("stop_at", [0.5, 1.0])
def test_a_target_is_met_when_only_every_second_epoch_is_stepped(mode, stop_at):
    model, optimizer, allocator = setup(mode, target_macs=0.5, epochs=8, stop_at=stop_at)
    for epoch in range(0, 8, 2):  # the last acting epoch is 3, or 7
        train(model, optimizer, steps=1, seed=epoch)
        allocator.step(epoch)
    assert ratio(model, "target_macs", allocator.budget.dense) == pytest.approx(0.5, rel=WITHIN)


def test_a_target_that_slots_cannot_meet_warns_and_says_the_closest():
    conv = sc.SelectConv2d(8, 8, 3, padding=1)  # a slot is an eighth of the model
    norm = nn.BatchNorm2d(8)
    conv.mean_source = sc.BatchNormMean(norm, torch.relu)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.ReLU(), conv)
    allocator = sc.ChannelAllocator(
        model, total_epochs=2, mode="dealloc", target_macs=0.7, example_input=IMAGES
    )
    with pytest.warns(sc.SelectConvWarning, match=r"`target_macs` 0.7 was not met: 0\.750 of"):
        allocator.step(0)
    assert int(conv.gate.sum()) == 6
    allocator = sc.ChannelAllocator(  # 0.75 is 2.6% below, and no warning comes
        model, total_epochs=2, mode="dealloc", target_macs=0.77, example_input=IMAGES
    )
    assert not allocator.step(0)


# `gamma="auto"`: a share of the slots for each step, and the gamma that closes it.


@pytest.mark.parametrize(("epochs", "stop_at"), [(1, 0.5), (4, 0.5), (40, 0.5), (300, 0.3)])
@pytest.mark.parametrize("reopens", [True, False])
def test_shares_fall_and_sum_up(epochs: int, stop_at: float, reopens: bool) -> None:
    mode = "select" if reopens else "dealloc"
    settings = Settings(epochs, gamma="auto", stop_at=stop_at, mode=mode)
    shares = [share_of_slots(settings, epoch) for epoch in range(epochs)]
    assert sum(shares) == pytest.approx(SHARE if reopens else CLOSED_SHARE)
    acting = [share for share in shares if share > 0]
    assert acting == sorted(acting, reverse=True)
    assert not any(shares[epoch] for epoch in range(epochs) if epoch >= stop_at * epochs)
    assert shares.index(acting[0]) == min(int(0.05 * epochs), settings.num_steps - 1)


def test_grace_follows_from_the_length() -> None:
    assert [Settings(epochs, gamma="auto").grace for epochs in (1, 10, 40)] == [1, 1, 4]
    assert Settings(40, gamma="auto", grace=9).grace == 9


def _model(**options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = sc.create_model(
        "densenet40", selective=True, growth_rate=8, units=[2, 2], num_classes=10, **options
    )
    for layer in select_layers(model).values():  # nothing has faded in a fresh model: let a part
        layer.weight.detach()[:, ::2] *= 1e-3
    return model


def test_steps_close_the_share() -> None:
    model = _model()
    allocator = sc.ChannelAllocator(model, total_epochs=20, gamma="auto", seed=1)
    slots = sum(m.in_channels for m in allocator.layers.values() if m.shift is not None)
    total = 0
    for epoch in range(4):
        closed = sum(
            len(plan.closed)
            for name, plan in allocator.step(epoch).plan
            if allocator.layers[name].shift is not None
        )
        assert closed == pytest.approx(share_of_slots(allocator.settings, epoch) * slots, abs=1.0)
        total += closed
    assert total > 0


def test_gamma_has_a_limit() -> None:
    torch.manual_seed(0)
    model = sc.create_model("densenet40", selective=True, growth_rate=8, units=[2, 2])
    assert not sc.ChannelAllocator(model, total_epochs=2, gamma="auto").step(0)  # nothing has faded
    allocator = sc.ChannelAllocator(model, total_epochs=2, gamma="auto")
    for layer in allocator.layers.values():
        layer.weight.detach().mul_(torch.linspace(0.01, 1, layer.in_channels)[:, None, None])
    gammas = solve_gammas(allocator.settings, allocator.layers, 0, {})
    most = {name: MOST / layer.in_channels for name, layer in allocator.layers.items()}
    # A share of 0.6 at once would need more.
    assert any(gammas[name] == most[name] for name in gammas)
    necdm = {name: layer.ecdm(normalized=True) for name, layer in allocator.layers.items()}
    plans = allocator.step(0).plan
    assert plans
    for name, plan in plans:
        assert float(necdm[name][plan.closed].sum(dim=0).max()) <= most[name] + 1e-6


def test_layers_that_never_reopen_keep_the_papers_gamma() -> None:
    model = _model()
    allocator = sc.ChannelAllocator(model, total_epochs=20, gamma="auto")
    gammas = solve_gammas(allocator.settings, allocator.layers, 5, {})
    assert {name: gamma == CLOSE_ONLY for name, gamma in gammas.items()} == {
        name: layer.shift is None for name, layer in allocator.layers.items()
    }
    only = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc")
    assert len(set(solve_gammas(only.settings, only.layers, 5, {}).values())) == 1


@pytest.mark.parametrize("last_epoch", [-1, 19])
def test_on_demand_it_closes_as_much_as_the_first_step(last_epoch: int) -> None:
    allocator = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc")
    first = next(epoch for epoch in range(20) if share_of_slots(allocator.settings, epoch))
    wanted = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc").step(
        first
    )
    allocator.load_state_dict(allocator.state_dict() | {"last_epoch": last_epoch})
    assert wanted.deallocated
    assert "gamma='auto'" in repr(allocator)
    assert allocator.dealloc().deallocated == wanted.deallocated
