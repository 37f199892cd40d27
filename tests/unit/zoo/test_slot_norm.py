"""The authors' placement, SelectChannel before a batch norm with an entry for each slot."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.core.kernels import simple_path
from selectconv.lab.zoo.slot_norm import SlotNormConv2d, SlotNormReluConv

SIZES = {"growth_rate": 4, "units": (2, 1)}


def build(seed=0, **options):
    torch.manual_seed(seed)
    options = {"selective": True, "placement": "before-norm", **options}
    return sc.create_model("densenet40", **SIZES, **options)


def batch(seed=1):
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def slot_layers(model):
    return [module for module in model.modules() if isinstance(module, SlotNormConv2d)]


def make_block(channels=4, filters=3):
    """A block whose entries all differ; slot 2 is closed, slot 3 reads channel 1, shifted."""
    torch.manual_seed(3)
    block = SlotNormReluConv()
    norm = nn.BatchNorm2d(channels)
    conv = SlotNormConv2d(channels, filters, 1, bias=False)
    conv.mean_source = sc.BatchNormMean(norm, torch.relu)
    for name, module in (("norm", norm), ("relu", nn.ReLU(inplace=True)), ("conv", conv)):
        block.add_module(name, module)
    with torch.no_grad():
        for entries in (norm.weight, norm.bias, norm.running_mean):
            entries.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.5)
        conv.gate[2] = False
        conv.index[3] = 1
        conv.moved[3] = conv.shifted[3] = True
        conv.shift[3] = torch.tensor([0.75, -1.25])
    return block


def reference(block, x, training):
    """By the definition, slot by slot."""
    conv, norm = block.conv, block.norm
    slots = []
    for slot in range(conv.in_channels):
        channel = x[:, conv.index[slot]][:, None]
        if bool(conv.shifted[slot]):
            channel = sc.functional.shift2d(channel, conv.shift[slot][None])
        mean, var = norm.running_mean[slot], norm.running_var[slot]
        if training:
            mean, var = channel.mean(), channel.var(unbiased=False)
        channel = (channel - mean) / (var + norm.eps).sqrt() * norm.weight[slot] + norm.bias[slot]
        slots.append(F.relu(channel) * conv.gate[slot])
    return F.conv2d(torch.cat(slots, dim=1), conv.weight)


@pytest.mark.parametrize("training", [False, True])
def test_a_fresh_network_computes_what_the_plain_one_computes(training):
    model = build().train(training)
    plain = build(selective=False).train(training)
    assert len(slot_layers(model)) == 3
    assert torch.equal(model(batch()), plain(batch()))


def test_only_layers_that_reallocate_differ():
    model = build()
    selective = [m for m in model.modules() if isinstance(m, sc.SelectConv2d)]
    assert {type(m) for m in selective if m.shift is not None} == {SlotNormConv2d}
    assert {type(m) for m in selective if m.shift is None} == {sc.SelectConv2d}


@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_block_follows_the_definition(training, simple):
    block = make_block().train(training)
    x = torch.randn(2, 4, 5, 6)
    expected = reference(copy.deepcopy(block), x, training)
    if simple:
        with simple_path():
            got = block(x)
    else:
        got = block(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gradients_follow_the_definition():
    block = make_block()
    twin = copy.deepcopy(block)
    x = torch.randn(2, 4, 5, 6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    block(ours).square().sum().backward()
    reference(twin, theirs, training=True).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for own, other in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient():
    model = build()
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mean_is_that_of_the_slots_own_entries():
    block = make_block()
    conv, norm = block.conv, block.norm
    expected = sc.functional.expected_relu(norm.bias, norm.weight) * conv.gate
    torch.testing.assert_close(conv.input_mean(), expected)
    assert conv.input_mean()[2] == 0
    assert conv.input_mean()[3] != conv.input_mean()[1]


def entries_of(norm):
    return torch.stack([norm.weight, norm.bias, norm.running_mean, norm.running_var]).detach()


@pytest.mark.parametrize(
    ("closed", "source", "donor"),
    [
        ([], 0, 0),  # the channel's own slot
        ([], 1, 1),  # its own before its copy, slot 3
        ([1], 1, 3),  # its own is closed in the same step: the copy
        ([], 2, 2),  # nobody reads it any more
    ],
)
def test_reopened_slot_takes_over_the_entries_of_the_slot_it_copies(closed, source, donor):
    block = make_block()
    before = entries_of(block.norm)
    plan = {"closed": closed, "opened": [[2, source, [0.5, 0.5]]]}
    layer_plan = sc.AllocationPlan.from_dict({"conv": plan}).layers["conv"]
    block.conv.apply_plan(layer_plan)
    expected = before.clone()
    expected[:, 2] = before[:, donor]
    assert torch.equal(entries_of(block.norm), expected)
    assert int(block.conv.index[2]) == source


def test_allocation_keeps_the_function_and_clears_what_slots_remember():
    model = build()
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for seed in range(3):
        optimizer.zero_grad()
        model(batch(seed)).square().sum().backward()
        optimizer.step()
    layer = slot_layers(model)[-1]
    norm = layer.mean_source.bn
    weak = [1, 4]
    with torch.no_grad():
        layer.weight[:, weak] = 0
    model.eval()
    before = model(batch())
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=4, gamma=1e-6)
    report = allocator.step(0)
    (opened,) = report.reallocated.values()
    assert opened == weak
    torch.testing.assert_close(model(batch()), before)
    for parameter in (norm.weight, norm.bias):
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum[weak].eq(0).all()
        assert parameter.grad[weak].eq(0).all()
        assert momentum.ne(0).sum() == len(momentum) - len(weak)


def test_followers_get_their_own_norms_entries():
    model = build()
    follower = copy.deepcopy(model)
    layer, copied = slot_layers(model)[0], slot_layers(follower)[0]
    with torch.no_grad():
        layer.weight[:, 2] = 0
        copied.mean_source.bn.weight.uniform_(2, 3)
    sc.ChannelAllocator(model, total_epochs=4, gamma=1e-6, followers=[follower]).step(0)
    source = int(copied.index[2])
    norm = copied.mean_source.bn
    assert copied.moved[2]
    assert norm.weight[2] == norm.weight[source] > 1


def test_runs_compiled():
    model = build()
    sc.ChannelAllocator(model, total_epochs=4, gamma=0.2).step(0)
    assert any(bool(layer.shifted.any()) for layer in slot_layers(model))
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with simple_path():
        expected = model(batch())
    torch.testing.assert_close(compiled(batch()), expected, rtol=1e-4, atol=1e-5)


def test_damage_is_measured_on_what_the_conv_sees():
    model = build()
    sc.ChannelAllocator(model, total_epochs=4, gamma=0.2).step(0)
    model.eval()
    name, layer = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, SlotNormConv2d) and m.moved.any()
    )
    with torch.no_grad():
        layer.weight.normal_()
    slot = int(layer.moved.nonzero()[0])
    seen = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(batch())
        damage = sc.observe_damage(model, [batch()])[name]
        seen[1:] = []
        layer.close([slot])
        model(batch())
    hook.remove()
    measured = (seen[0] - seen[1]).mean(dim=(0, 2, 3))
    torch.testing.assert_close(damage.measured[slot], measured, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: sc.compress(model, x),
        lambda model, x: sc.count(model, x),
        lambda model, x: sc.ChannelAllocator(
            model, total_epochs=2, target_macs=0.5, example_input=x
        ),
    ],
)
def test_what_needs_whole_layers_refuses_it(call):
    with pytest.raises(sc.CompressionError, match="placement='input'"):
        call(build(), batch())


def test_without_its_norm_a_plan_is_refused():
    block = make_block()
    block.conv.mean_source = sc.ObservedMean()
    gate = block.conv.gate.clone()
    with pytest.raises(sc.AllocationError, match="BatchNormMean"):
        block.conv.close([0])
    assert torch.equal(block.conv.gate, gate)


def test_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="before-norm"):
        build(placement="before_norm")


def test_description_and_state_follow(tmp_path):
    model = build()
    sc.ChannelAllocator(model, total_epochs=4, gamma=0.2).step(0)
    moved = sum(row.moved for row in sc.describe(model))
    assert moved > 0
    twin = build(seed=5)
    twin.load_state_dict(model.state_dict())
    model.eval(), twin.eval()
    assert torch.equal(model(batch()), twin(batch()))
