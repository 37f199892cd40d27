"""`sc.observe_damage` against slots that are really closed, one after another."""

import copy

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import selectconv as sc
from tiny_models import (
    BATCH_NORMS,
    Net,
    assert_same,
    conv_net,
    images,
    select_layers,
    snapshot,
    train,
)

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


def closed_one_by_one(model, batches, name="2"):
    """Close each slot on a copy: mean and rms of what that changes in the layer's output."""

    def output(closed):
        twin = copy.deepcopy(model).double().eval()
        layer = twin.get_submodule(name)
        layer.close(closed)
        found = []
        layer.register_forward_hook(lambda *call: found.append(call[-1]))
        with torch.no_grad():
            for x in batches:
                twin(x.double())
        return torch.cat([y.transpose(0, 1).flatten(1) for y in found], dim=1)

    whole = output([])
    slots = range(model.get_submodule(name).in_channels)
    changes = [whole - output([slot]) for slot in slots]
    mean = torch.stack([change.mean(dim=1) for change in changes])
    rms = torch.stack([change.square().mean(dim=1).sqrt() for change in changes])
    return mean.float(), rms.float()


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
def test_equals_closing_each_slot(axes, arguments):
    model = one_layer(axes, **arguments)
    batches = [batch_for(axes, 5), batch_for(axes, 2)]  # the mean is over images, not over batches
    damage = sc.observe_damage(model, batches)["2"]
    mean, rms = closed_one_by_one(model, batches)
    torch.testing.assert_close(damage.measured, mean, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(damage.measured_rms, rms, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(damage.expected, model[2].ecdm())
    torch.testing.assert_close(damage.expected_rms, model[2].ecdm(damage="rms"))
    assert damage.is_open.tolist() == [slot != 3 for slot in range(8)]
    assert not damage.measured[3].any()
    assert damage.measured.abs().sum() > 0


def test_large_inputs_are_taken_in_parts(monkeypatch):
    model, batches = one_layer(padding=1), [batch_for(2)]
    whole = sc.observe_damage(model, batches)["2"]
    monkeypatch.setattr("selectconv.allocate.damage._CHUNK", 1)
    parts = sc.observe_damage(model, batches)["2"]
    torch.testing.assert_close(parts.measured, whole.measured)
    torch.testing.assert_close(parts.measured_rms, whole.measured_rms)


def test_agrees_with_ecdm_where_its_assumption_holds():
    # A normal input of batch norm's own parameters, a 1x1 conv: Eq. (1) and (2) are exact.
    model = one_layer(kernel_size=1)
    with torch.no_grad():
        model[2].shift.zero_()  # a shift blurs, and takes zeros in at the border
    x = torch.randn(200, 8, 16, 16)
    damage = sc.observe_damage(model, [x])["2"]
    # 51200 samples: a relative standard error of about 1 / sqrt(51200) = 0.5 %; five of them.
    scale = damage.expected.abs().amax()
    assert (damage.measured - damage.expected).abs().amax() < 0.025 * scale
    assert damage.correlation() > 0.99
    assert damage.rank_correlation("rms") > 0.9


def test_correlations_are_those_of_scipy_and_the_worst_are_named():
    model = one_layer(padding=1)
    damage = sc.observe_damage(model, [batch_for(2) + 1.0])["2"]
    for kind, pair in {
        "mean": (damage.expected, damage.measured),
        "rms": (damage.expected_rms, damage.measured_rms),
    }.items():
        slots = [slot for slot in range(8) if slot != 3]
        expected, measured = (
            [
                max(float(matrix[slot, j].abs() / matrix[:, j].abs().sum()) for j in range(6))
                for slot in slots
            ]
            for matrix in pair
        )
        assert damage.correlation(kind) == pytest.approx(stats.pearsonr(expected, measured)[0])
        assert damage.rank_correlation(kind) == pytest.approx(
            stats.spearmanr(expected, measured)[0]
        )
        excess = sorted(
            ((m - e, slot) for e, m, slot in zip(expected, measured, slots, strict=True)),
            reverse=True,
        )
        worst = [slot for difference, slot in excess if difference > 0]
        assert [bad.slot for bad in damage.worst(damage=kind)] == worst[:5]
        first = damage.worst(1, kind)[0]
        assert first.measured - first.expected == pytest.approx(excess[0][0])


def test_equal_shares_share_their_rank():
    model = one_layer(kernel_size=1)
    damage = sc.observe_damage(model, [batch_for(2)])["2"]
    tied = damage.expected.clone()
    tied[:4] = tied[0]
    tied = type(damage)(**{**vars(damage), "expected": tied})
    assert tied.rank_correlation("mean") == pytest.approx(
        stats.spearmanr(*(side.tolist() for side in tied.shares("mean")))[0]
    )


def test_a_side_that_does_not_vary_has_no_correlation():
    model = one_layer(kernel_size=1)
    with torch.no_grad():
        model[2].weight.zero_()
    report = sc.observe_damage(model, [batch_for(2)])
    assert report["2"].correlation() is None
    assert report["2"].worst() == []
    assert " - " in str(report)
    model[2].close([0, 1, 2, 3, 4, 5, 6])
    assert sc.observe_damage(model, [batch_for(2)])["2"].rank_correlation() is None


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
        [{"input": x, "label": labels}],  # what nn.Sequential calls its argument
    ):
        got = sc.observe_damage(model, batches)["conv2"].measured
        torch.testing.assert_close(got, measured)
    got = sc.observe_damage(model, [{"a": [x]}], forward=lambda net, batch: net(batch["a"][0]))
    torch.testing.assert_close(got["conv2"].measured, measured)


def test_a_forward_that_takes_any_keyword_gets_the_whole_dict():
    model = Net(lambda net, x: net.inner(x), inner=trained())
    seen = []
    model.forward = lambda **entries: (seen.append(sorted(entries)), model.inner(entries["x"]))[1]
    sc.observe_damage(model, [{"x": images(4)[0], "y": 3}])
    assert seen == [["x", "y"]]


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
    assert_same(snapshot(model), before)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(sc.AllocationError, match=r"fails on batch 1: .*expected input"):
        sc.observe_damage(model, [images(8), torch.zeros(1, 5, 8, 8)])
    assert_same(snapshot(model), before)
    assert [module.training for module in model.modules()] == modes
    assert not any(layer._forward_pre_hooks for layer in select_layers(model).values())


def test_prints_a_table_and_names_what_no_batch_reached():
    body = trained()
    model = Net(lambda net, x: net.body(x), body=body, spare=one_layer())
    report = sc.observe_damage(torch.compile(model, backend="eager"), [images(8)])
    assert list(report) == ["body.conv1", "body.conv2"]
    assert report.unreached == ("spare.2",)
    heads, first, second, summary, unreached = str(report).splitlines()
    assert heads.split()[:4] == ["layer", "E[X]", "open", "by"]
    assert first.startswith("body.conv1  batch norm + ReLU    12  mean")
    worst = report["body.conv2"].worst(1)[0]
    assert f"{worst.slot}: {worst.expected:.2g} -> {worst.measured:.2g}" in second
    lowest = min(report.values(), key=lambda row: row.rank_correlation())
    assert summary.endswith(f"lowest {lowest.rank_correlation():.2f} at {lowest.name}")
    assert unreached == "no batch passed through: spare.2"


def test_observed_means_decide_by_rms():
    model = one_layer()
    model[2].mean_source = sc.ObservedMean()
    with pytest.raises(sc.MeanSourceError, match="`2`: the layer has not seen any input"):
        sc.observe_damage(model, [batch_for(2)])
    model(batch_for(2))
    damage = sc.observe_damage(model, [batch_for(2)])["2"]
    assert damage.decides_by == "rms"
    assert damage.correlation() == damage.correlation("rms") != damage.correlation("mean")


@pytest.mark.parametrize(
    ("model", "batches", "error", "message"),
    [
        (3, [], TypeError, "`model` must be an nn.Module, got int"),
        (conv_net(convert=False), [images()], sc.AllocationError, "no selective layers"),
        (conv_net(), [], sc.AllocationError, "contains no batch"),
        (conv_net(), iter(()), sc.AllocationError, "contains no batch"),
        (conv_net(), images()[0], TypeError, "`batches` must be an iterable .* got Tensor"),
        (conv_net(), {"x": images()[0]}, TypeError, "`batches` must be an iterable .* got dict"),
        (conv_net(), 7, TypeError, "`batches` must be an iterable .* got int"),
        (conv_net(), [()], sc.AllocationError, "batch 0: the batch is empty"),
        (
            conv_net(),
            [{"label": 1}],
            sc.AllocationError,
            r"none of .*'label'.* is an argument .*\(input\)",
        ),
    ],
)
def test_refusals(model, batches, error, message):
    with pytest.raises(error, match=message):
        sc.observe_damage(model, batches)
