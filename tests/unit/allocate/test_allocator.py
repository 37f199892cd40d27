import copy
import dataclasses
import functools
import gc
import inspect
import json
import math
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.allocate.settings import Settings
from tiny_models import (
    Net,
    allocation_of,
    assert_same,
    conv_net,
    dense_net,
    images,
    outputs,
    select_layers,
    silence,
    snapshot,
    train,
    weights_of,
)

MAX_SHIFT = 1.5  # the paper's
# Adding products with zero weights may change the order of float32 sums: a few units in the last
# place of outputs near 1.
ROUNDING = 1e-5

# Most tests are about one step, for which decay does not matter.
pytestmark = pytest.mark.filterwarnings("ignore:`optimizer` has a weight decay of 0")

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


def allocator_for(model, optimizer=None, **arguments):
    return sc.ChannelAllocator(model, optimizer, **{"total_epochs": 20, **arguments})


def trained_pair(name="sgd"):
    """A model with silent slots and an optimizer that has gathered state in real training."""
    model = conv_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for layer in select_layers(model).values():
        layer.shifted.fill_(True)  # so that shifts gather state, too
    train(model, optimizer)
    return model, optimizer, silence(model)


def silent_net(build=conv_net, **arguments):
    """A model, and its silent slots by layer."""
    model = build(**arguments)
    return model, silence(model)


def assert_refused(act, message, *parts, error=sc.AllocationError):
    """Check that a call is refused, and that it changes nothing: model, optimizer, allocator."""
    before = snapshot(*parts)
    with pytest.raises(error, match=message):
        act()
    assert_same(snapshot(*parts), before)


def twin_of(model, optimizer, name="sgd"):
    """A copy of a model and its optimizer, which share no tensor with them."""
    twin = copy.deepcopy(model)
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = copy.deepcopy(original.grad)
    twin_optimizer = OPTIMIZERS[name](twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, twin_optimizer


# What each mode does


@pytest.mark.parametrize("mode", ["select", "zero", "random"])
def test_reopening_modes_move_exactly_the_silent_slots(mode):
    model, silent = silent_net()
    before = copy.deepcopy(select_layers(model))
    report = allocator_for(model, mode=mode).step(0)
    assert report.deallocated == report.reallocated == silent
    for name, layer in select_layers(model).items():
        slots = silent[name]
        others = [slot for slot in range(layer.in_channels) if slot not in slots]
        assert layer.gate.all()
        assert layer.moved.nonzero().flatten().tolist() == slots
        assert layer.shifted.nonzero().flatten().tolist() == (slots if mode == "select" else [])
        assert set(layer.index[slots].tolist()) <= set(others), "reads a channel that was open"
        assert layer.index[others].tolist() == others
        assert_same(weights_of(layer, others), weights_of(before[name], others))
        assert bool((weights_of(layer, slots) == 0).all()) == (mode != "random")
        drawn = layer.shift.detach()[slots]
        assert bool((drawn != 0).all()) == (mode == "select")
        assert drawn.abs().max() <= MAX_SHIFT
        assert not layer.shift[others].any()


@pytest.mark.parametrize("in_groups", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_shifts_stay_whole_whatever_the_optimizer_does(name, in_groups):
    model, (x, _) = conv_net(), images()
    optimizer = OPTIMIZERS[name](sc.param_groups(model) if in_groups else model.parameters())
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    follower = copy.deepcopy(model)
    allocator = allocator_for(
        model, optimizer, gamma=0.3, shifts="whole", total_epochs=4, followers=[follower]
    )

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return loss

    for epoch in range(4):
        optimizer.step(closure)
        closure()
        optimizer.step()
        plan = allocator.preview().plan.to_dict()
        assert epoch > 1 or allocator.step(epoch).plan.to_dict() == plan
    moved = 0
    for layer, other in zip(
        select_layers(model).values(), select_layers(follower).values(), strict=True
    ):
        assert torch.equal(layer.shift, layer.shift.round())
        assert torch.equal(layer.shift, other.shift)
        assert not layer.shift.grad.any()
        reads = [(*row[:1], *row[1]) for row in zip(layer.index.tolist(), layer.shift.tolist(),
                 strict=True)]  # fmt: skip
        assert len(set(reads)) == len(reads), "no two slots read the same"
        moved += int(layer.shifted.sum())
        assert layer.shift.any(dim=1)[layer.shifted].all()
    assert moved > 0
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    allocator_for(model, optimizer, total_epochs=4)  # learned, the default
    closure()
    assert any(layer.shift.grad.any() for layer in select_layers(model).values())


@pytest.mark.parametrize("build", [conv_net, dense_net])
def test_dealloc_mode_only_closes(build):
    model = build()
    silent = silence(model)
    expected = copy.deepcopy(dict(model.state_dict()))
    for name, slots in silent.items():
        expected[f"{name}.gate"][slots] = False
    report = allocator_for(model, mode="dealloc").step(0)
    assert (report.deallocated, report.reallocated) == (silent, {})
    assert_same(dict(model.state_dict()), expected)


def test_layers_that_do_not_reallocate_stay_closed_in_select_mode():
    model, silent = silent_net(dense_net)
    report = allocator_for(model).step(0)
    assert report.deallocated == silent
    reopening = {name for name, layer in select_layers(model).items() if layer.shift is not None}
    assert 0 < len(reopening) < len(silent)
    assert set(report.reallocated) == reopening


def test_shift_mode_draws_a_shift_for_every_slot_and_never_allocates():
    model, _ = silent_net(dense_net)
    before = copy.deepcopy(dict(model.state_dict()))
    allocator = allocator_for(model, mode="shift")
    shifts = []
    for name, layer in select_layers(model).items():
        if layer.shift is not None:
            shifts.append(layer.shift.detach().flatten())
            before[f"{name}.shift"].copy_(layer.shift)
            before[f"{name}.shifted"].fill_(True)
    drawn = torch.cat(shifts)
    assert drawn.unique().numel() == drawn.numel()
    # With n draws from U[-1.5, 1.5] the largest falls below 1.2 with probability 0.8^n: n > 60.
    assert 1.2 < drawn.abs().max() <= MAX_SHIFT
    assert drawn.min() < 0 < drawn.max()
    assert not allocator.preview()
    assert not allocator.step(0)
    assert_same(dict(model.state_dict()), before)


def test_shifts_are_drawn_once_not_again_for_a_loaded_model():
    model = conv_net()
    follower = copy.deepcopy(model)
    allocator_for(model, mode="shift", seed=1, followers=[follower])
    assert_same(dict(follower.state_dict()), dict(model.state_dict()))
    loaded = conv_net()
    loaded.conv1.shifted[2] = True  # a single one tells
    before = copy.deepcopy(dict(loaded.state_dict()))
    allocator_for(loaded, mode="shift", seed=2)
    assert_same(dict(loaded.state_dict()), before)


def test_none_mode_changes_nothing_and_takes_plain_models_too():
    model, _ = silent_net()
    before = snapshot(model)
    allocator = allocator_for(model, mode="none")
    assert not allocator.preview()
    assert not allocator.step(0)
    assert_same(snapshot(model), before)
    plain = allocator_for(conv_net(convert=False), mode="none")
    assert not any((plain.step(0), plain.dealloc(), plain.realloc()))


# The schedule and the report


@pytest.mark.parametrize(
    ("total_epochs", "stop_at", "acting"),
    [(4, 0.5, [0, 1]), (5, 0.5, [0, 1, 2]), (1, 0.5, [0]), (3, 0.0, []), (3, 1.0, [0, 1, 2])],
)
def test_steps_act_in_the_first_part_of_the_training(total_epochs, stop_at, acting):
    model = conv_net()
    allocator = allocator_for(model, total_epochs=total_epochs, stop_at=stop_at)
    acted = []
    for epoch in range(total_epochs):
        silence(model)  # the slots re-opened before, too: there is always something to do
        report = allocator.step(epoch)
        assert report.epoch == epoch
        assert bool(report) == bool(report.deallocated)
        acted += [epoch] if report else []
    assert acted == acting


def test_an_epoch_is_stepped_once_and_in_order_but_may_be_skipped():
    allocator = allocator_for(conv_net())
    allocator.step(0)
    allocator.step(3)
    for epoch, error, said in (
        (3, sc.AllocationError, "`epoch` 3 .*the last was 3"),
        (2, sc.AllocationError, "`epoch` 2 .*the last was 3"),
        (-1, ValueError, "`epoch`.*-1"),
        (1.5, TypeError, r"`epoch`.*1\.5"),
    ):
        with pytest.raises(error, match=said):
            allocator.step(epoch)
    allocator.step(4)


def test_a_report_is_false_when_nothing_changed_and_reads_as_a_sentence():
    model = conv_net()
    allocator = allocator_for(model, mode="dealloc")
    nothing = allocator.step(0)
    assert not nothing
    assert (nothing.deallocated, nothing.reallocated) == ({}, {})
    assert str(nothing) == "epoch 0: 0 slots de-allocated, 0 re-allocated in 0 layers"
    silence(model)  # 3 slots in each of two layers
    assert str(allocator.step(1)) == "epoch 1: 6 slots de-allocated, 0 re-allocated in 2 layers"
    assert str(allocator.realloc()) == "0 slots de-allocated, 6 re-allocated in 2 layers"
    last = allocator.settings.total_epochs - 1
    assert str(allocator.step(last)) == f"epoch {last}: no step, since stop_at has passed"


@pytest.mark.parametrize("mode", ["select", "zero", "random", "dealloc"])
def test_preview_tells_what_the_next_step_does_and_changes_nothing(mode):
    model, optimizer, silent = trained_pair()
    allocator = allocator_for(model, optimizer, mode=mode, grace=1)
    for epoch in range(3):  # grace protects at the second step, not at the third
        before = snapshot(model, optimizer, allocator)
        preview = allocator.preview()
        assert_same(snapshot(model, optimizer, allocator), before)
        assert allocator.step(epoch).plan.to_dict() == preview.plan.to_dict()
        if epoch == 0:
            assert preview.deallocated == silent


def test_steps_draw_no_global_random_numbers_and_repeat_with_the_seed():
    def states(seed, noise):
        torch.manual_seed(0)
        model = conv_net()
        silence(model)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        allocator_for(model, seed=seed, mode="select").step(0)
        assert_same(torch.get_rng_state(), before)
        return dict(model.state_dict())

    first = states(seed=3, noise=1)
    assert_same(states(seed=3, noise=2), first)
    assert not torch.equal(states(seed=4, noise=1)["conv1.shift"], first["conv1.shift"])


def test_each_step_draws_new_random_numbers():
    model = conv_net()
    silent = silence(model)["conv1"]
    allocator = allocator_for(model)
    drawn = []
    for epoch in range(2):  # nothing trains, so that the same slots move again
        allocator.step(epoch)
        drawn.append(model.conv1.shift.detach()[silent].clone())
    assert not torch.isclose(*drawn).any()


# On demand, grace


@pytest.mark.parametrize("mode", ["select", "none"])
def test_dealloc_and_realloc_on_demand_work_in_any_mode_and_after_the_schedule(mode):
    model, silent = silent_net()
    allocator = allocator_for(model, mode=mode, total_epochs=1, stop_at=0.0)
    allocator.step(0)
    closed = allocator.dealloc()
    assert (closed.epoch, closed.deallocated, closed.reallocated) == (None, silent, {})
    layers = select_layers(model)
    assert {name: (~layers[name].gate).nonzero().flatten().tolist() for name in layers} == silent
    opened = allocator.realloc()
    assert (opened.epoch, opened.deallocated, opened.reallocated) == (None, {}, silent)
    assert all(layer.gate.all() for layer in layers.values())
    assert not allocator.realloc()
    with pytest.warns(sc.SelectConvWarning, match="`epoch` 1 is past `total_epochs` 1"):
        assert allocator.step(1).epoch == 1  # on demand is no epoch
    assert not allocator.step(17)  # said once


@pytest.mark.parametrize("grace", [0, 1, 2])
def test_a_reopened_slot_is_safe_for_as_many_steps_as_grace_says(grace):
    model, silent = silent_net()
    allocator = allocator_for(model, grace=grace)
    # Nothing trains the zeros of re-opened slots, so they close again as soon as they may.
    closed_at = [epoch for epoch in range(6) if allocator.step(epoch).deallocated == silent]
    assert closed_at == list(range(0, 6, grace + 1))


def test_grace_also_holds_on_demand_and_survives_a_restart():
    model, silent = silent_net()
    twin = copy.deepcopy(model)
    allocator = allocator_for(model, grace=1)
    report = allocator.step(0)
    restarted, applied = allocator_for(model, grace=1), allocator_for(twin, grace=1)
    restarted.load_state_dict(allocator.state_dict())
    applied.apply(report.plan)
    assert not any(one.dealloc() for one in (allocator, restarted, applied))
    assert not any(one.step(1) for one in (allocator, restarted))
    assert restarted.step(2).deallocated == silent


# Plans


@pytest.mark.parametrize("mode", ["select", "zero", "random", "dealloc"])
def test_a_plan_read_from_json_repeats_the_step_bit_by_bit(mode):
    model, optimizer, _ = trained_pair()
    fresh, fresh_optimizer = twin_of(model, optimizer)
    line = json.dumps(allocator_for(model, optimizer, mode=mode).step(0).plan.to_dict())
    replaying = allocator_for(fresh, fresh_optimizer, seed=9)
    replaying.apply(sc.AllocationPlan.from_dict(json.loads(line)))
    assert_same(snapshot(fresh, fresh_optimizer), snapshot(model, optimizer))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"nine": {"closed": [1], "opened": []}}, r"does not have: \['nine'"),
        ({"conv1": {"closed": [13], "opened": []}}, r"`conv1`: `closed` names \[13\]"),
        (
            {
                "conv1": {"closed": [0], "opened": [[0, 2, None]]},
                "conv2": {"closed": [0], "opened": [[1, 2, None]]},
            },
            r"`conv2`: slots \[1\] are open already",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, message):
    model, optimizer, _ = trained_pair()
    allocator = allocator_for(model, optimizer)
    read = sc.AllocationPlan.from_dict(plan)
    assert_refused(lambda: allocator.apply(read), message, model, optimizer, allocator)


# The function is preserved, and the optimizer forgets


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reallocation_preserves_the_function_also_over_an_optimizer_step(name):
    model, optimizer, silent = trained_pair(name)
    allocator = allocator_for(model, optimizer)
    assert allocator.dealloc().deallocated == silent
    twin, twin_optimizer = twin_of(model, optimizer, name)
    assert allocator.realloc().reallocated == silent
    torch.testing.assert_close(outputs(model), outputs(twin), rtol=0, atol=ROUNDING)

    moved_by_momentum = outputs(twin)
    for parameters, one in ((model, optimizer), (twin, twin_optimizer)):
        for parameter in parameters.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.step()
    for layer_name, layer in select_layers(model).items():
        assert not weights_of(layer, silent[layer_name]).any()
    torch.testing.assert_close(outputs(model), outputs(twin), rtol=0, atol=ROUNDING)
    if name != "adagrad":  # which keeps no momentum
        assert (outputs(twin) - moved_by_momentum).abs().max() > 100 * ROUNDING


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_forgets_reopened_slots_and_nothing_else(name):
    model, optimizer, silent = trained_pair(name)
    allocator = allocator_for(model, optimizer)
    expected = snapshot(model, optimizer)
    names = [parameter_name for parameter_name, _ in model.named_parameters()]
    forgotten = 0
    for layer_name, slots in silent.items():
        for kind in ("weight", "shift"):
            own = expected["optimizer"]["state"][names.index(f"{layer_name}.{kind}")]
            per_element = [value for key, value in own.items() if key != "step"]
            per_element.append(expected["gradients"][f"{layer_name}.{kind}"])
            for value in per_element:
                part = value[:, slots] if kind == "weight" else value[slots]
                forgotten += int(part.any())
                part.zero_()
                value[(slice(None), slots) if kind == "weight" else slots] = part
    assert forgotten >= 4 * len(silent), "state and gradient of weight and shift in each layer"
    allocator.step(0)
    got = snapshot(model, optimizer)
    assert_same(got["optimizer"], expected["optimizer"])  # Adam's step counter included
    assert_same(got["gradients"], expected["gradients"])


def test_without_an_optimizer_pending_gradients_are_cleared_too():
    model, silent = silent_net()
    model(images()[0]).square().sum().backward()
    assert model.conv1.weight.grad[:, silent["conv1"]].any()
    allocator_for(model).step(0)
    assert not model.conv1.weight.grad[:, silent["conv1"]].any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.Adafactor, "Adafactor keeps its state 'row_var'"),
        (torch.optim.LBFGS, "LBFGS keeps state"),
        (torch.optim.Rprop, "Rprop keeps state"),
    ],
)
def test_optimizers_whose_state_has_no_slots_are_refused(build, message):
    model = conv_net()
    optimizer = build(model.parameters(), lr=1e-3)
    x, labels = images()

    def closure():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    silence(model)
    allocator = allocator_for(model, optimizer)
    assert_refused(lambda: allocator.step(0), message, model, optimizer, allocator)
    allocator.dealloc()  # closing needs to forget nothing
    assert not all(layer.gate.all() for layer in select_layers(model).values())


def test_an_optimizer_that_does_not_own_the_parameters_is_refused():
    model = conv_net(convert=False)
    too_early = torch.optim.SGD(model.parameters(), lr=0.1)
    sc.convert(model)
    with pytest.raises(sc.AllocationError, match=r"does not own 2 .*'conv1\.shift'.*sc\.convert"):
        allocator_for(model, too_early)
    with pytest.raises(sc.AllocationError, match=r"does not own 4 .*'conv1\.weight'"):
        allocator_for(model, torch.optim.SGD(conv_net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch optimizer.*got Parameter"):
        allocator_for(model, list(model.parameters()))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"total_epochs": 0}, ValueError, "`total_epochs`.*at least 1, got 0"),
        ({"total_epochs": True}, TypeError, "`total_epochs`.*got True"),
        ({"total_epochs": 2.0}, TypeError, r"`total_epochs`.*got 2\.0"),
        ({"gamma": -1}, ValueError, "`gamma`.*got -1"),
        ({"gamma": 2}, ValueError, "`gamma`.*got 2"),
        ({"gamma": math.nan}, ValueError, "`gamma`.*got nan"),
        ({"gamma": "0.1"}, TypeError, "`gamma`.*got '0.1'"),
        ({"top_k": 0}, ValueError, "`top_k`.*got 0"),
        ({"max_copies": 0}, ValueError, "`max_copies`.*got 0"),
        ({"stop_at": 1.5}, ValueError, r"`stop_at`.*got 1\.5"),
        ({"grace": -1}, ValueError, "`grace`.*got -1"),
        ({"seed": -1}, ValueError, "`seed`.*got -1"),
        (
            {"mode": "selct"},
            ValueError,
            "`mode`.*select, zero, random, dealloc, shift, none.*'selct'.*mean 'select'",
        ),
        ({"followers": conv_net()}, TypeError, "`followers` must be a list of models"),
        ({"followers": torch.tensor(1.0)}, TypeError, "`followers` must be a list of models"),
        ({"followers": [3]}, TypeError, r"`followers` must be a list of models, got \[3\]"),
        ({"shifts": "half"}, ValueError, "`shifts`.*learned, whole.*'half'"),
        ({"shifts": "whole", "mode": "zero"}, ValueError, "`shifts` 'whole'.*`mode`.*'zero'"),
        ({"shifts": "whole", "mode": "shift"}, ValueError, "`shifts` 'whole'.*`mode`.*'shift'"),
        ({"damage": "men"}, ValueError, "`damage`.*auto, mean, rms.*'men'.*mean 'mean'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(arguments, error, message):
    model = conv_net()
    assert_refused(lambda: allocator_for(model, **arguments), message, model, error=error)


def test_the_signature_has_the_defaults_of_the_settings():
    signature = inspect.signature(sc.ChannelAllocator).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    del defaults["total_epochs"]
    assert {name: signature[name].default for name in defaults} == defaults


def test_a_model_without_selective_layers_is_refused():
    with pytest.raises(sc.AllocationError, match=r"no selective layers.*sc\.convert"):
        allocator_for(conv_net(convert=False))


@pytest.mark.parametrize(("max_copies", "moved"), [(None, 8), (2, 2)])  # with the original: 3
def test_max_copies_and_top_k_reach_the_layers(max_copies, moved):
    model = conv_net(width=16)
    silence(model, fraction=0.5)
    allocator_for(model, top_k=1, max_copies=max_copies).step(0)
    for layer in select_layers(model).values():
        assert len(layer.index[layer.moved].unique()) == 1
        assert (int(layer.moved.sum()), int(layer.gate.sum())) == (moved, 8 + moved)


# Broken and missing statistics


@pytest.mark.parametrize("broken", ["conv2.weight", "norm2.weight", "norm2.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_reported_with_the_layers_name_before_anything_changes(broken, value):
    model, optimizer, _ = trained_pair()
    entries = model.get_parameter(broken).detach().view(-1)
    entries[5] = value
    allocator = allocator_for(model, optimizer)
    what = "weights" if broken == "conv2.weight" else "input statistics"
    for act in (lambda: allocator.step(0), allocator.dealloc, allocator.preview):
        # conv1, which has slots to close, comes first and is not touched either.
        assert_refused(act, f"`conv2`.*{what}", model, optimizer, allocator)
    entries[5] = 1.0
    assert "conv1" in allocator.step(0).deallocated  # the refused epoch may be stepped again


@pytest.mark.parametrize(
    ("source", "message"),
    [(None, "does not know its input's mean"), (sc.ObservedMean(), "has not seen any input")],
    ids=["none", "observed nothing"],
)
def test_a_layer_without_a_mean_is_named(source, message):
    model, _ = silent_net()
    model.conv2.mean_source = source
    step = functools.partial(allocator_for(model).step, 0)
    assert_refused(step, f"`conv2`: .*{message}", model, error=sc.MeanSourceError)


def test_a_layer_that_training_does_not_reach_is_left_alone_with_one_warning():
    used, aside = conv_net(), sc.SelectConv2d(12, 12, 1)
    used.conv2.mean_source = aside.mean_source = sc.ObservedMean()
    silent = silence(used)
    model = Net(lambda net, x: net.used(x), used=used, aside=aside)
    allocator = allocator_for(model)
    model(images()[0])
    with pytest.warns(sc.SelectConvWarning, match="training has not reached `aside`"):
        report = allocator.step(0)
    assert report.reallocated == {f"used.{name}": slots for name, slots in silent.items()}
    assert not allocator.step(1).deallocated.get("aside")  # and no second warning


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gamma": "auto"},
        {"mode": "dealloc", "target_params": 0.8, "example_input": images()[0]},
        {"mode": "select", "target_params": 0.8, "example_input": images()[0]},
        {"mode": "shift"},
    ],
    ids=["gamma", "auto", "dealloc to a target", "select to a target", "shift"],
)
def test_frozen_weights_are_never_touched(arguments):
    model, _ = silent_net()
    frozen = nn.ModuleList([model.conv1, model.head]).requires_grad_(False)
    before = copy.deepcopy(dict(frozen.state_dict()))
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, weight_decay=1e-4)
    with warnings.catch_warnings(record=True):  # a budget may say that it was not met
        allocator = allocator_for(model, optimizer, total_epochs=1, **arguments)
        assert "conv1" not in allocator.step(0).deallocated
    for act in (allocator.preview, allocator.dealloc, allocator.realloc):
        assert not {"conv1", "head"} & set(act().plan.layers)
    assert_same(dict(frozen.state_dict()), before)
    row = next(row for row in sc.describe(model) if row.name == "conv1")
    assert "frozen" in row.source
    model.requires_grad_(False)
    if "mode" not in arguments:
        with pytest.warns(sc.SelectConvWarning, match="all selective layers are frozen"):
            assert not allocator_for(model, **arguments).step(0)


# What a user should hear of


def test_nothing_keeps_a_model_and_its_optimizer_alive():
    model, optimizer, _ = trained_pair()
    other = copy.deepcopy(model)
    allocator_for(model, optimizer, followers=[copy.deepcopy(model)]).step(0)
    parts = [weakref.ref(part) for part in (model, optimizer, other)]
    gc.disable()
    del model, optimizer, other
    gc.enable()
    assert [part() for part in parts] == [None, None, None]


def test_repr_tells_settings_and_state():
    model, silent = silent_net()
    allocator = allocator_for(model, mode="dealloc", gamma=0.02)
    allocator.step(3)
    counts = f"last_epoch=3, layers=2, moved=0, closed={sum(map(len, silent.values()))}"
    for words in ("mode='dealloc'", "gamma=0.02", "total_epochs=20", counts):
        assert words in repr(allocator)


def test_a_state_of_other_settings_is_noticed():
    state = allocator_for(conv_net(), gamma=0.05).state_dict()
    other = allocator_for(conv_net(), gamma=0.4, mode="dealloc")
    said = r"gamma 0\.05, here 0\.4; mode 'select', here 'dealloc'"
    with pytest.warns(sc.SelectConvWarning, match=said) as caught:
        other.load_state_dict(state)
    assert len(caught) == 1


# Followers


def average(model):
    multi_avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi_avg_fn)


@pytest.mark.parametrize("follow", [copy.deepcopy, average])
@pytest.mark.parametrize("mode", ["select", "random", "dealloc"])
def test_followers_get_the_same_plan(follow, mode):
    model = conv_net()
    follower = follow(model)
    silent = silence(model)
    followed = follower.module if follow is average else follower
    before = copy.deepcopy(dict(followed.state_dict()))
    allocator_for(model, mode=mode, followers=[follower]).step(0)
    assert_same(allocation_of(followed), allocation_of(model))
    for name, layer in select_layers(followed).items():
        own = select_layers(model)[name]
        assert_same(layer.shift.detach(), own.shift.detach())
        if mode != "dealloc":
            assert_same(weights_of(layer, silent[name]), weights_of(own, silent[name]))
            before[f"{name}.weight"][:, silent[name]] = weights_of(own, silent[name])
        assert_same(layer.weight.detach(), before[f"{name}.weight"])


@pytest.mark.parametrize(
    ("build", "differs_at"),
    [
        (dense_net, r"blocks\.0\.0\.pointwise\.conv"),
        (lambda: conv_net(width=16), "conv1"),
        (lambda: conv_net(convert=False), "conv1"),
    ],
)
def test_a_follower_of_another_architecture_is_refused(build, differs_at):
    model = conv_net()
    with pytest.raises(sc.AllocationError, match=f"`followers`.*differ at '{differs_at}'"):
        allocator_for(model, followers=[build()])
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    with pytest.raises(sc.AllocationError, match=r"use_buffers=True.*update_bn"):
        allocator_for(model, followers=[averaged])


# State


def state_of(model):
    return allocator_for(model).state_dict()


def test_a_state_is_a_copy_in_both_directions():
    model, _ = silent_net()
    allocator = allocator_for(model)
    for epoch in range(2):
        state = allocator.state_dict()
        kept = copy.deepcopy(state)
        if epoch == 1:
            allocator.load_state_dict(state)
        allocator.step(epoch)
        assert_same(state, kept)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state | {"version": 99}, "version 1, got .*99"),
        (
            lambda state: {k: v for k, v in state.items() if k != "generator"},
            "is damaged.*generator",
        ),
        (lambda state: [1], r"version 1, got \[1\]"),
        (lambda state: state_of(conv_net(width=16)), r"another architecture.*'conv1', 12"),
        (lambda state: state_of(dense_net()), "another architecture.*pointwise"),
        (lambda state: state | {"last_epoch": 5, "generator": torch.ones(3)}, "is damaged"),
        (lambda state: state | {"last_epoch": "five"}, "is damaged"),
        (lambda state: state | {"last_epoch": 5, "opened_at": None}, "is damaged"),
    ],
    ids=["version", "missing", "list", "width", "layers", "generator", "epoch", "slots"],
)
def test_a_state_that_does_not_fit_is_refused(spoil, message):
    model, _ = silent_net()
    allocator = allocator_for(model, grace=1)
    allocator.step(0)
    spoilt = spoil(allocator.state_dict())
    assert_refused(lambda: allocator.load_state_dict(spoilt), message, model, None, allocator)


@pytest.mark.parametrize("mode", ["select", "zero", "random"])
def test_a_default_device_of_another_kind_does_not_matter(mode):
    # On the meta device nothing can be read: whatever was created there would fail.
    plans = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = dense_net()
        silence(model)
        with torch.device(device):
            allocator = sc.ChannelAllocator(model, total_epochs=2, mode=mode)
            plans.append(allocator.step(0).plan.to_dict())
    assert plans[0] == plans[1] != {}


def test_numbers_of_numpy_and_torch_are_kept_as_plain_ones():
    model, _ = silent_net()
    allocator = sc.ChannelAllocator(
        model,
        total_epochs=np.int64(3),
        gamma=np.float32(0.1),
        top_k=torch.tensor(2),
        max_copies=np.int32(4),
        stop_at=torch.tensor(1.0),
        grace=np.int64(0),
        seed=np.int64(1),
    )
    report = allocator.step(np.int64(0))
    settings = {**allocator.state_dict()["settings"], "epoch": report.epoch}
    assert {type(value) for value in settings.values()} == {int, float, str, type(None)}
    assert json.dumps(report.to_dict())
    gammas = np.linspace(0, 0.1, 3, dtype=np.float32)
    assert [row.gamma for row in allocator.preview(gammas=gammas)] == gammas.tolist()
    decays = sc.param_groups(model, weight_decay=np.float32(0.5))
    assert type(decays[0]["weight_decay"]) is float
