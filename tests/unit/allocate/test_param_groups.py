import math

import pytest
import torch
from torch import nn

import selectconv as sc
from tiny_models import conv_net, decay, dense_net, select_layers, shifted_net


def ids(parameters):
    return sorted(id(parameter) for parameter in parameters)


def shared_net():
    model = conv_net()
    model.add_module("again", model.conv1)
    return model


@pytest.mark.parametrize("build", [conv_net, dense_net, shared_net])
def test_shifts_have_a_group_and_a_decay_of_their_own(build):
    model = build()
    others, shifts = sc.param_groups(model)
    layers = select_layers(model).values()
    assert ids(shifts["params"]) == ids(x.shift for x in layers if x.shift is not None)
    assert "weight_decay" not in others  # the optimizer's own acts
    assert shifts["weight_decay"] == 1e-5  # the paper's
    assert ids(others["params"] + shifts["params"]) == ids(model.parameters())


def test_a_plain_model_has_one_group():
    model = conv_net(convert=False)
    (group,) = sc.param_groups(model, weight_decay=0.1)
    assert (ids(group["params"]), group["weight_decay"]) == (ids(model.parameters()), 0.1)


def test_frozen_parameters_are_left_out():
    model = conv_net()
    model.stem.weight.requires_grad_(False)
    model.conv1.shift.requires_grad_(False)
    others, shifts = sc.param_groups(model)
    assert id(model.stem.weight) not in ids(others["params"])
    assert ids(shifts["params"]) == [id(model.conv2.shift)]
    model.conv2.shift.requires_grad_(False)
    assert len(sc.param_groups(model)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight_decay": -0.1}, ValueError, r"`weight_decay`.*-0\.1"),
        ({"weight_decay": math.nan}, ValueError, "`weight_decay`.*nan"),
        ({"weight_decay": "much"}, TypeError, "`weight_decay`.*'much'"),
        ({"shift_weight_decay": math.inf}, ValueError, "`shift_weight_decay`.*inf"),
        ({"shift_weight_decay": True}, TypeError, "`shift_weight_decay`.*True"),
    ],
)
def test_bad_decays_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        sc.param_groups(conv_net(), **arguments)


def test_nothing_to_train_and_no_model_are_refused():
    for model in (nn.ReLU(), conv_net().requires_grad_(False)):
        with pytest.raises(ValueError, match="`model` has no parameters"):
            sc.param_groups(model)
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module, got list"):
        sc.param_groups([])


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizers_own_decay_acts_unless_one_is_given(optimizer_type):
    model = conv_net()
    others, shifts = optimizer_type(sc.param_groups(model), lr=0.1, weight_decay=0.05).param_groups
    assert (others["weight_decay"], shifts["weight_decay"]) == (0.05, 1e-5)
    groups = sc.param_groups(model, weight_decay=0.02)
    optimizer = optimizer_type(groups, lr=0.1, weight_decay=0.05)
    assert optimizer.param_groups[0]["weight_decay"] == 0.02


def test_a_group_of_shifts_alone_decays_as_it_says():
    model = shifted_net()
    optimizer = torch.optim.SGD(sc.param_groups(model, shift_weight_decay=0.5), 0.1)
    sc.ChannelAllocator(model, optimizer, total_epochs=4, mode="none")
    assert decay(optimizer, model)["conv1.shift"] < 0.5
