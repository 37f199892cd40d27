"""`sc.observe_damage` against slots that are really closed, one after another."""

import copy
import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import selectconv as sc
from tiny_models import BATCH_NORMS, Net, assert_same, conv_net, images, snapshot, train

# Means of float32 outputs of size 1: differences of them are right to some 1e-6.
ROUNDING = 1e-5

SELECT = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}
SIZES = {1: (11,), 2: (7, 6), 3: (5, 4, 6)}


def one_layer(axes=2, **arguments):
    """Batch norm, ReLU, and one selective layer with closed, copied and shifted slots."""
    bn = BATCH_NORMS[axes](8)
    layer = SELECT[axes](8, 6, **{"kernel_size": 3, **arguments})
    layer.mean_source = sc.BatchNormMean(bn, torch.relu)
    with torch.no_grad():
        bn.weight.copy_(torch.rand(8) + 0.5)
        bn.bias.copy_(torch.randn(8))
        layer.close([1, 6])
        layer.realloc(generator=torch.Generator().manual_seed(0))
        layer.weight.copy_(torch.randn_like(layer.weight))
        layer.close([3])
    return nn.Sequential(bn, nn.ReLU(), layer)


def batch_for(axes, count=5):
    return torch.randn(count, 8, *SIZES[axes])


def closed_one_by_one(model, batches):
    """Close each slot on a copy: what that changes in the outputs, (I, O, positions)."""

    def output(closed):
        twin = copy.deepcopy(model).double().eval()
        twin[2].close(closed)
        with torch.no_grad():
            found = [twin(x.double()) for x in batches]
        return torch.cat([y.transpose(0, 1).flatten(1) for y in found], dim=1)

    whole = output([])
    return torch.stack([whole - output([slot]) for slot in range(8)])


@pytest.mark.parametrize("chunk", [1 << 22, 1])
@pytest.mark.parametrize(
    ("axes", "arguments"),
    [
        (2, {}),
        (2, {"kernel_size": 1}),
        (2, {"padding": 1, "stride": 2, "bias": False}),
        (2, {"padding": (2, 1), "kernel_size": (5, 3), "stride": (1, 2), "dilation": (1, 2)}),
        (2, {"padding": "same", "kernel_size": 4, "dilation": 2}),
        (2, {"padding": 1, "padding_mode": "reflect"}),
        (2, {"padding": 2, "padding_mode": "circular", "groups": 2}),
        (2, {"padding": 1, "padding_mode": "replicate", "stride": 3}),
        (1, {"padding": 1, "groups": 2}),
        (3, {"padding": 1, "stride": (1, 2, 1), "groups": 2}),
    ],
)
def test_equals_closing_each_slot(axes, arguments, chunk, monkeypatch):
    monkeypatch.setattr("selectconv.allocate.damage._CHUNK", chunk)
    model = one_layer(axes, **arguments)
    batches = [batch_for(axes, 5), batch_for(axes, 2)]  # the mean is over images, not over batches
    changes = closed_one_by_one(model, batches)
    damage = sc.observe_damage(model, batches)["2"]
    mean = changes.mean(dim=2).float()
    torch.testing.assert_close(damage.measured, mean, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(damage.expected, model[2].ecdm())
    assert damage.damage == "mean"
    assert damage.is_open.tolist() == [slot != 3 for slot in range(8)]
    assert not damage.measured[3].any()
    assert damage.measured.abs().sum() > 0
    model[2].mean_source = sc.BatchNormMean(model[0], nn.Identity())  # signed: rms
    damage = sc.observe_damage(model, batches)["2"]
    rms = changes.square().mean(dim=2).sqrt().float()
    torch.testing.assert_close(damage.measured, rms, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(damage.expected, model[2].ecdm(damage="rms"))
    assert damage.damage == "rms"


def test_agrees_with_ecdm_where_its_assumption_holds():
    # A normal input of batch norm's own parameters, a 1x1 conv: Eq. (1) and (2) are exact.
    model = one_layer(kernel_size=1)
    model[2].shift.detach().zero_()  # a shift blurs, and takes zeros in at the border
    damage = sc.observe_damage(model, [torch.randn(200, 8, 16, 16)])["2"]
    # 51200 samples: a relative standard error of about 1 / sqrt(51200) = 0.5 %; five of them.
    scale = damage.expected.abs().amax()
    assert (damage.measured - damage.expected).abs().amax() < 0.025 * scale
    assert damage.rank_correlation() > 0.9


def test_the_correlation_is_that_of_scipy():
    damage = sc.observe_damage(one_layer(padding=1), [batch_for(2) + 1.0])["2"]
    tied = damage.expected.clone()
    tied[:3] = tied[0]  # equal shares share their rank
    damage = type(damage)(**{**vars(damage), "expected": tied})
    slots = [slot for slot in range(8) if slot != 3]
    expected, measured = (
        [
            max(float(matrix[slot, j].abs() / matrix[:, j].abs().sum()) for j in range(6))
            for slot in slots
        ]
        for matrix in (damage.expected, damage.measured)
    )
    assert damage.rank_correlation() == pytest.approx(stats.spearmanr(expected, measured)[0])


def test_a_side_that_does_not_vary_has_no_correlation():
    model = one_layer(kernel_size=1)
    model[2].weight.detach().zero_()
    assert str(sc.observe_damage(model, [batch_for(2)])).endswith("nan")
    model[2].close([0, 1, 2, 3, 4, 5, 6])
    assert math.isnan(sc.observe_damage(model, [batch_for(2)])["2"].rank_correlation())


def trained():
    model = conv_net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), 5)
    return model


def test_takes_batches_of_any_kind():
    model, (x, labels) = trained(), images(8)
    measured = sc.observe_damage(model, [x])["conv2"].measured
    for batches in (
        [(x, labels)],
        [[x, labels]],
        iter([x[:3], x[3:]]),
        DataLoader(TensorDataset(x, labels), batch_size=3),
        [{"input": x}],  # what nn.Sequential calls its argument
    ):
        got = sc.observe_damage(model, batches)["conv2"].measured
        torch.testing.assert_close(got, measured)


def test_layers_called_by_keyword_several_times_or_without_a_batch_axis():
    model = one_layer(padding=1)
    x = batch_for(2)
    mean = sc.observe_damage(model, [x, x[:2]])["2"].measured
    twice = Net(lambda net, x: (net.body(x), net.body[2](input=net.body[:2](x[:2]))), body=model)
    torch.testing.assert_close(sc.observe_damage(twice, [x])["body.2"].measured, mean)
    alone = Net(lambda net, x: [net.body[2](image) for image in net.body[:2](x)], body=model)
    torch.testing.assert_close(sc.observe_damage(alone, [x, x[:2]])["body.2"].measured, mean)


def test_changes_nothing():
    model = trained()
    model.norm1.eval()  # a mode of its own
    modes = [module.training for module in model.modules()]
    before = snapshot(model)
    sc.observe_damage(model, [images(8)])
    with pytest.raises(RuntimeError, match="expected input"):
        sc.observe_damage(model, [images(8), torch.zeros(1, 5, 8, 8)])
    assert_same(snapshot(model), before)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_prints_a_table_of_the_layers_that_a_batch_reached():
    model = Net(lambda net, x: net.body(x), body=trained(), spare=one_layer())
    report = sc.observe_damage(torch.compile(model, backend="eager"), [images(8)])
    assert list(report) == ["body.conv1", "body.conv2"]
    heads, first, _ = str(report).splitlines()
    assert heads.split() == ["layer", "E[X]", "open", "by", "rank", "r"]
    rank = report["body.conv1"].rank_correlation()
    assert first == f"body.conv1  batch norm + ReLU    12  mean    {rank:.2f}"
    assert repr(report) == str(report)


@pytest.mark.parametrize(
    ("model", "batches", "error", "message"),
    [
        (3, [], TypeError, "`model`.*int"),
        (conv_net(convert=False), [images()], sc.AllocationError, "no selective layers"),
        (conv_net(), iter(()), sc.AllocationError, "no batch"),
        (conv_net(), images()[0], TypeError, "`batches`.*Tensor"),
        (conv_net(), {"x": images()[0]}, TypeError, "`batches`.*dict"),
        (conv_net(), 7, TypeError, "`batches`.*int"),
    ],
)
def test_refusals(model, batches, error, message):
    with pytest.raises(error, match=message):
        sc.observe_damage(model, batches)


def test_a_mean_that_is_not_known_is_refused():
    model = one_layer()
    model[2].mean_source = sc.ObservedMean()
    with pytest.raises(sc.MeanSourceError, match="`2`: the layer has not seen any input"):
        sc.observe_damage(model, [batch_for(2)])
