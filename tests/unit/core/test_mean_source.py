"""Where E[X] and Var[X] come from: batch norm, constants, concatenation, observation."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv import BatchNormMean, ConcatMean, ConstantMean, ObservedMean, SelectedMean
from selectconv.core.kernels import simple_path
from tiny_models import conv_net, images

# float32 running moments of a few batches.
FLOAT32_TOLERANCE = 1e-5
# API.md allows E[act] an absolute error of 1e-4 * (1 + |gamma|); gammas here stay below 3.
INTEGRAL_TOLERANCE = 4e-4
SAMPLES = 200_000
# Standard errors between the closed form and Monte Carlo, for a fixed seed.
DEVIATIONS = 5


def batch_norm(bias, weight):
    bn = nn.BatchNorm2d(len(bias))
    with torch.no_grad():
        bn.bias.copy_(torch.tensor(bias))
        bn.weight.copy_(torch.tensor(weight))
    return bn


def name_of(value):
    """Name a parameter of a test without its address in memory."""
    return getattr(value, "__name__", None) or str(value)


BIAS, WEIGHT = [-1.5, -0.2, 0.0, 0.7, 2.0], [0.5, -1.3, 1.0, 2.0, 0.0]


# BatchNormMean


@pytest.mark.parametrize(
    "act",
    [None, torch.relu, nn.ReLU6(), nn.LeakyReLU(0.2), nn.SiLU(), torch.tanh, nn.PReLU(5)],
    ids=name_of,
)
def test_mean_and_var_agree_with_monte_carlo(act):
    bn = batch_norm(BIAS, WEIGHT)  # weight also negative, and zero
    if isinstance(act, nn.PReLU):
        act.weight.detach().copy_(torch.linspace(-0.5, 0.5, 5))  # one slope a channel
    source = BatchNormMean(bn, act)
    normal = torch.randn(SAMPLES, 5) * bn.weight.detach() + bn.bias.detach()
    with torch.no_grad():
        x = (normal if act is None else act(normal)).double()
    var, mean = torch.var_mean(x, dim=0)
    spread_of_mean = (var / SAMPLES).sqrt()
    spread_of_var = (((x - mean) ** 2).var(dim=0) / SAMPLES).sqrt()
    assert source.num_channels == 5
    for ours, theirs, spread in (
        (source.mean(), mean, spread_of_mean),
        (source.var(), var, spread_of_var),
    ):
        assert ours.shape == (5,)
        assert ours.dtype == torch.float64
        assert not ours.requires_grad
        error = (ours.double() - theirs).abs()
        assert bool((error <= DEVIATIONS * spread + INTEGRAL_TOLERANCE).all())


def test_a_batch_norm_without_affine_is_standard_normal():
    for track in (True, False):
        bn = nn.BatchNorm2d(3, affine=False, track_running_stats=track)
        source = BatchNormMean(bn, torch.relu)
        assert source.mean().tolist() == pytest.approx([1 / math.sqrt(2 * math.pi)] * 3)
        assert source.var().tolist() == pytest.approx([0.5 - 1 / (2 * math.pi)] * 3)


def test_a_batch_norm_without_bias_has_mean_zero():
    net, x = conv_net(), images()[0]
    net.norm1.bias = net.norm2.bias = None  # as torch 2.13 makes them with `bias=False`
    source = net.conv1.mean_source
    expected = net.norm1.weight.detach().double().abs() / math.sqrt(2 * math.pi)
    torch.testing.assert_close(source.mean(), expected)
    net.conv1.close([0])
    plain = F.conv2d(net.conv1.select(net[:3](x)), net.conv1.weight)
    torch.testing.assert_close(net[:4](x), plain)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (nn.ReLU(), True),
        (nn.ReLU(inplace=True), True),
        (F.relu, True),
        (torch.relu_, True),
        (nn.ReLU6(inplace=True), True),
        (nn.Sigmoid(), True),
        (nn.Softplus(), True),
        (torch.abs, True),
        (nn.SiLU(), False),
        (nn.GELU(), False),
        (nn.Hardswish(), False),
        (nn.LeakyReLU(), False),
        (nn.PReLU(2), False),
        (nn.ELU(), False),
        (nn.Tanh(), False),
        (None, False),
    ],
    ids=name_of,
)
def test_is_nonnegative_tells_signed_inputs(act, expected):
    assert BatchNormMean(nn.BatchNorm2d(2), act).is_nonnegative is expected


def test_batch_norm_mean_refuses_what_it_cannot_read():
    with pytest.raises(TypeError, match="`bn` must be a batch norm, got GroupNorm"):
        BatchNormMean(nn.GroupNorm(1, 2), torch.relu)
    with pytest.raises(TypeError, match="`act` must be callable or None, got 'relu'"):
        BatchNormMean(nn.BatchNorm2d(2), "relu")
    with pytest.raises(ValueError, match="must be elementwise"):
        BatchNormMean(nn.BatchNorm2d(2), torch.sum).mean()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (BatchNormMean(nn.BatchNorm2d(2), nn.ReLU()), "batch norm + ReLU"),
        (BatchNormMean(nn.BatchNorm2d(2), torch.relu), "batch norm + relu"),
        (BatchNormMean(nn.BatchNorm2d(2), None), "batch norm"),
        (ConstantMean(0.5, 2), "constant 0.5"),
        (ObservedMean(), "observed"),
        (
            ConcatMean([SelectedMean(ConcatMean([ConstantMean(1, 4)]), [0]), ConstantMean(1, 2)]),
            "concat of 2: constant 1",
        ),
        (SelectedMean(ConstantMean(1, 4), [0, 3, 3]), "3 of 4 channels: constant 1"),
        (
            ConcatMean([ConstantMean(0, 1), ConstantMean(0, 2), ConstantMean(1, 1)]),
            "concat of 3: constant 0, constant 1",
        ),
    ],
    ids=repr,
)
def test_repr(source, text):
    assert repr(source) == text


# ConstantMean, ConcatMean and SelectedMean


def test_channels_are_joined_and_selected_in_order():
    bn = batch_norm([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    inner = ConcatMean([ConstantMean(-3.0, 1), BatchNormMean(bn, None)])
    joined = ConcatMean([inner, ConstantMean(0.0, 2)])
    source = SelectedMean(joined, [3, 0, 0, 5, 2])
    assert (joined.num_channels, source.num_channels) == (6, 5)
    assert joined.mean().tolist() == [-3.0, 1.0, 2.0, 3.0, 0.0, 0.0]
    assert joined.var().tolist() == [0.0, 0.0, 1.0, 4.0, 0.0, 0.0]
    assert source.mean().tolist() == [3.0, -3.0, -3.0, 0.0, 2.0]
    assert source.var().tolist() == [4.0, 0.0, 0.0, 0.0, 1.0]
    assert source.batch_norms() == [bn]


def test_joined_channels_are_nonnegative_where_all_parts_are():
    relu, signed = (BatchNormMean(nn.BatchNorm2d(1), act) for act in (torch.relu, None))
    assert SelectedMean(ConcatMean([relu, ConstantMean(0.0, 1)]), [0]).is_nonnegative
    for part in (signed, ConstantMean(-1.0, 1)):
        assert not SelectedMean(ConcatMean([relu, part]), [0]).is_nonnegative


def test_joined_channels_need_parts():
    with pytest.raises(TypeError, match=r"`parts` .*got \[\]"):
        ConcatMean([])
    with pytest.raises(ValueError, match="`num_channels` must be at least 1, got 0"):
        ConstantMean(0.0, 0)


@pytest.mark.parametrize(
    ("index", "got"), [([0, 4], r"\[0, 4\]"), ([-1], r"\[-1\]"), ([], r"\[\]")]
)
def test_selected_channels_must_exist(index, got):
    with pytest.raises(ValueError, match=f"`index` .*0 to 3, got {got}"):
        SelectedMean(ConstantMean(0.0, 4), index)


# ObservedMean, in the layer that keeps its buffers


def observing_layer(momentum=0.1, channels=3):
    layer = sc.SelectConv2d(channels, 2, 1)
    layer.mean_source = ObservedMean(momentum)
    return layer


def batches(count):
    # Batches that differ in mean and spread: the variance of the mixture is more than their mean.
    return [torch.randn(4, 3, 5, 6) * (1 + k) + k for k in range(count)]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_the_first_batches_are_pooled_exactly(count):
    layer, seen = observing_layer(), batches(count)
    for x in seen:
        layer(x)
    var, mean = torch.var_mean(torch.cat(seen).double(), dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(layer.observed_mean.double(), mean, rtol=FLOAT32_TOLERANCE, atol=0)
    torch.testing.assert_close(layer.observed_var.double(), var, rtol=FLOAT32_TOLERANCE, atol=0)
    assert int(layer.observed_batches) == count


def test_later_batches_fade_exponentially():
    layer, seen = observing_layer(momentum=0.25), batches(7)
    for x in seen:
        layer(x)
    first, second = torch.zeros(3).double(), torch.zeros(3).double()
    for k, x in enumerate(seen):
        share = max(1 / (k + 1), 0.25)
        x = x.double()
        first = (1 - share) * first + share * x.mean(dim=(0, 2, 3))
        second = (1 - share) * second + share * (x * x).mean(dim=(0, 2, 3))
    var = second - first * first
    torch.testing.assert_close(layer.observed_mean.double(), first, rtol=FLOAT32_TOLERANCE, atol=0)
    torch.testing.assert_close(layer.observed_var.double(), var, rtol=FLOAT32_TOLERANCE, atol=0)


@pytest.mark.parametrize(("images", "training"), [(2, False), (0, True)], ids=["eval", "empty"])
def test_nothing_is_observed_in_evaluation_or_in_an_empty_batch(images, training):
    layer = observing_layer().train(training)
    layer(torch.randn(images, 3, 4, 4))
    assert int(layer.observed_batches) == 0
    with pytest.raises(sc.MeanSourceError, match="not seen any input yet"):
        layer.input_mean()


def test_an_input_that_the_conv_refuses_is_not_observed():
    layer = observing_layer()
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        layer(torch.randn(2, 1, 4, 4))  # one channel would broadcast over the buffers
    assert int(layer.observed_batches) == 0
    assert not layer.observed_mean.any()


def test_bfloat16_is_observed_in_float32():
    layer = observing_layer()
    x = (torch.randn(8, 3, 16, 16) + 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    assert layer.observed_mean.dtype == torch.float32
    expected = x.double().mean(dim=(0, 2, 3))
    error = (layer.observed_mean.double() - expected).abs().max()
    assert float(error) < FLOAT32_TOLERANCE  # a mean taken in bfloat16 would be off by 1e-2


def test_observing_records_no_graph_and_leaves_the_input_alone():
    layer = observing_layer()
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    version = x._version
    layer(x).sum().backward()
    assert not layer.observed_mean.requires_grad
    assert x._version == version


@pytest.mark.parametrize("momentum", [-0.1, 1.5, math.nan])
def test_momentum_is_a_fraction(momentum):
    with pytest.raises(
        ValueError, match=rf"`momentum` must be a number in \[0, 1\], got {momentum}"
    ):
        ObservedMean(momentum)


OBSERVED = {"observed_mean", "observed_var", "observed_batches"}


def test_switching_sources_adds_and_removes_the_buffers():
    layer = sc.SelectConv2d(3, 2, 1)
    plain = set(layer.state_dict())
    layer.mean_source = ObservedMean()
    assert set(layer.state_dict()) == plain | OBSERVED
    layer(torch.ones(1, 3, 2, 2))
    layer.mean_source = ObservedMean()  # a new source starts afresh
    assert int(layer.observed_batches) == 0
    layer.mean_source = BatchNormMean(nn.BatchNorm2d(3), torch.relu)
    assert set(layer.state_dict()) == plain
    layer.mean_source = None
    assert set(layer.state_dict()) == plain


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (nn.BatchNorm2d(3), TypeError, "`mean_source` must be a BatchNormMean"),
        ("bn", TypeError, "`mean_source` must be .* got 'bn'"),
        (ConstantMean(0.0, 4), ValueError, "`mean_source` .*3 channels, got 4"),
        (BatchNormMean(nn.BatchNorm2d(2), None), ValueError, "`mean_source` .*got 2"),
    ],
    ids=["a module", "a word", "too many channels", "too few channels"],
)
def test_a_mean_source_must_fit_the_layer(source, error, message):
    layer = observing_layer()
    kept = layer.mean_source
    with pytest.raises(error, match=message):
        layer.mean_source = source
    assert layer.mean_source is kept
    assert set(layer.state_dict()) >= OBSERVED
    with pytest.raises(error, match=message):
        sc.SelectConv2d.from_conv(nn.Conv2d(3, 4, 1), mean=source)


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (2, 7, 1, 1), (4, 3, 9)])
def test_the_kernel_observes_what_the_definition_does(shape):
    x, seen = 3 + torch.randn(shape), []
    for path in (contextlib.nullcontext, simple_path):
        conv = (sc.SelectConv2d if x.ndim == 4 else sc.SelectConv1d)(shape[1], 2, 1)
        conv.mean_source = sc.ObservedMean()
        with path():
            conv(x)
        seen.append((conv.observed_mean, conv.observed_var))
    torch.testing.assert_close(*seen)


def test_a_double_model_keeps_its_digits():
    layer = sc.SelectConv2d(3, 2, 1).double()
    bn = nn.BatchNorm2d(3).double()
    with torch.no_grad():
        bn.bias.copy_(torch.tensor([0.1, 1 / 3, 2.0]))
        bn.weight.zero_()
    layer.mean_source = BatchNormMean(bn, torch.relu)
    assert torch.equal(layer.input_mean(), bn.bias)
