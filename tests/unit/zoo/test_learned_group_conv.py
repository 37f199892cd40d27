"""CondenseNet's learned group convolution: groups, stages, the group lasso, and what it becomes."""

import copy

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.lab.zoo.learned_group_conv import (
    CondensedConv2d,
    Condenser,
    LearnedGroupConv2d,
    condense,
)

SMALL = {"growth_rates": (4, 8, 4), "units": (2, 1, 2)}
# A group conv adds up fewer terms than the dense conv with zeros, in another order.
ROUNDING = 1e-5


def small_net(**more):
    return sc.create_model("condensenet182", condense_factor=4, **SMALL, **more)


def learned(inputs, outputs, factor, num_groups=4):
    conv = nn.Conv2d(inputs, outputs, 1, bias=False)
    return LearnedGroupConv2d.from_conv(conv, num_groups, factor)


def naive_reads(weight, num_groups, kept):
    """Which inputs each group keeps if it keeps those of the largest L1 norm: plain loops."""
    outputs, inputs = weight.shape[:2]
    reads = []
    for group in range(num_groups):
        norms = [
            sum(abs(float(weight[j, i].detach())) for j in range(group, outputs, num_groups))
            for i in range(inputs)
        ]
        best = sorted(range(inputs), key=lambda i: -norms[i])[:kept]
        reads.append([i in best for i in range(inputs)])
    return torch.tensor(reads)


def test_the_condensed_network_has_condensenets_size_and_operations():
    model = sc.create_model("condensenet182", condense_factor=4).eval()
    assert sum(p.numel() for p in model.parameters()) == 13_792_906
    Condenser(model, total_epochs=1).step(0)
    cost = sc.count(condense(model), torch.zeros(1, 3, 32, 32))
    # Convs, the classifier's weights and biases, ReLU's inputs, average pooling's inputs.
    assert cost.macs_cn == 493_903_872 + 25_440 + 10 + 17_903_616 + 838_656
    assert cost.macs == 493_903_872 + 25_440
    assert cost.params == 4_221_946


def test_a_fresh_layer_is_the_dense_conv():
    torch.manual_seed(1)
    learned = small_net().eval()
    torch.manual_seed(1)
    plain = sc.create_model("condensenet182", **SMALL).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(learned(x), plain(x))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, learned.get_parameter(name)), name


def test_each_stage_drops_what_each_group_uses_least():
    layer = learned(12, 6, 4, num_groups=3)
    layer.weight.detach().copy_(torch.randn_like(layer.weight))
    for stage, kept in ((0, 12), (1, 9), (2, 6), (3, 3)):
        before = layer.reads.clone()
        dropped = layer.condense(stage)
        assert torch.equal(layer.reads, naive_reads(layer.weight, 3, kept))
        flat = (before & ~layer.reads).flatten().nonzero().flatten()
        assert torch.equal(dropped, flat)
        assert len(layer.condense(stage)) == 0, "a stage is reached once"


def test_what_was_dropped_stays_dropped():
    layer = learned(8, 4, 4, num_groups=2)
    layer.condense(1)
    gone = ~layer.reads
    layer.weight.detach()[gone.repeat(2, 1)] = 100.0  # momentum and decay go on behind the mask
    layer.condense(2)
    assert bool((~layer.reads)[gone].all())
    assert layer.reads.sum(dim=1).tolist() == [4, 4]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_condensed_conv_computes_the_same(stage, layout):
    layer = learned(8, 12, 4).to(memory_format=layout)
    layer.condense(stage)
    x = torch.randn(3, 8, 5, 4).contiguous(memory_format=layout)
    condensed = CondensedConv2d(layer)
    assert condensed.conv.groups == 4
    assert condensed.conv.weight.shape == (12, 8 * (4 - stage) // 4, 1, 1)
    # A naive oracle: every output from the inputs that its group reads.
    expected = torch.zeros(3, 12, 5, 4)
    for j in range(12):
        for i in range(8):
            if layer.reads[j % 4, i]:
                expected[:, j] += layer.weight[j, i, 0, 0] * x[:, i]
    torch.testing.assert_close(layer(x), expected, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(condensed(x), expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_condensed_network_computes_the_same_and_can_be_saved():
    model = small_net().eval()
    Condenser(model, total_epochs=1).step(0)
    x = torch.randn(2, 3, 16, 16)
    before = model(x)
    assert condense(model) is model
    assert not any(isinstance(m, LearnedGroupConv2d) for m in model.modules())
    assert sum(isinstance(m, CondensedConv2d) for m in model.modules()) == 5
    torch.testing.assert_close(model(x), before, rtol=ROUNDING, atol=ROUNDING)
    again = small_net().eval()
    Condenser(again, total_epochs=1).step(0)
    condense(again).load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("epochs", "parts_left"),
    [
        (6, [3, 2, 1, 1, 1, 1]),
        (12, [4, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]),
        (4, [3, 1, 1, 1]),  # 1/4 is past 1/6, 2/4 is at 3/6
        (1, [1]),
    ],
)
def test_condensing_after_a_sixth_two_and_three_of_the_epochs(epochs, parts_left):
    model = small_net()
    condenser = Condenser(model, total_epochs=epochs)
    slots = 4 * sum(layer.in_channels for layer in condenser.layers.values())
    for epoch, parts in enumerate(parts_left):
        before = condenser.num_dropped()
        report = condenser.step(epoch)
        assert condenser.num_dropped() == slots * (4 - parts) // 4
        dropped = sum(map(len, report.deallocated.values()))
        assert dropped == condenser.num_dropped() - before
        assert bool(report) == (dropped > 0)
        assert report.reallocated == {}


def test_the_state_is_in_the_models_buffers():
    model = small_net()
    Condenser(model, total_epochs=6).step(0)
    other = small_net()
    other.load_state_dict(model.state_dict())
    for left, right in zip(model.modules(), other.modules(), strict=True):
        if isinstance(left, LearnedGroupConv2d):
            assert torch.equal(left.reads, right.reads)
            assert int(left.reads[0].sum()) == left.in_channels * 3 // 4


def test_the_group_lasso_is_the_sum_of_the_norms_and_its_gradient_is_added():
    model = small_net()
    condenser = Condenser(model, total_epochs=6, group_lasso=0.5)
    condenser.step(0)
    layer = next(iter(condenser.layers.values()))
    norms = 0.0
    for group in range(4):
        for i in range(layer.in_channels):
            if layer.reads[group, i]:
                norms += float(layer.weight[group::4, i].detach().square().sum().sqrt())
    assert float(layer.group_lasso().detach()) == pytest.approx(norms, rel=1e-4)
    for own in condenser.layers.values():
        own.weight.grad = torch.ones_like(own.weight)
    reference = copy.deepcopy(layer)
    (0.5 * reference.group_lasso()).backward()
    condenser.regularize()
    torch.testing.assert_close(layer.weight.grad, 1 + reference.weight.grad)
    group, i = (~layer.reads).nonzero()[0].tolist()
    assert bool((layer.weight.grad[group::4, i] == 1).all()), "no penalty on what is dropped"


def test_without_a_group_lasso_gradients_stay_as_they_are():
    condenser = Condenser(small_net(), total_epochs=6)
    condenser.regularize()
    assert all(layer.weight.grad is None for layer in condenser.layers.values())


def test_dropped_inputs_get_no_gradient():
    model = small_net(dropout=0.0)
    Condenser(model, total_epochs=1).step(0)
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    for layer in model.modules():
        if isinstance(layer, LearnedGroupConv2d):
            gone = (~layer.reads).repeat(layer.out_channels // 4, 1)
            assert bool((layer.weight.grad[gone] == 0).all())
            assert bool((layer.weight.grad[~gone] != 0).any())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: learned(8, 6, 4), ValueError, "`num_groups` 4 must divide the 6"),
        (lambda: learned(9, 8, 4), ValueError, "`condense_factor` 4 the 9 inputs"),
        (lambda: learned(8, 8, 2.5), TypeError, "`condense_factor` must be an int"),
        (lambda: learned(8, 8, 0), ValueError, "`condense_factor` must be at least 1"),
        (lambda: Condenser(nn.Linear(2, 2), total_epochs=3), ValueError, "no learned group convs"),
        (lambda: small_net(selective=True), ValueError, "cannot be combined"),
        (
            lambda: sc.create_model("densenet40", condense_factor=4),
            TypeError,
            "`densenet40` has no argument 'condense_factor'",
        ),
        (
            lambda: Condenser(small_net(), total_epochs=3, group_lasso=-1.0),
            ValueError,
            "`group_lasso` must be a finite",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
