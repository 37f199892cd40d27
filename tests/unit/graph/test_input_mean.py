"""What the graph shows of a conv's input, each accepted case against the mean of real inputs."""

import copy
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.core.moments import is_relu
from selectconv.graph.input_mean import find_conv_inputs
from tiny_models import BATCH_NORMS, CONVS, Net

CHANNELS = 8
IMAGES = 512
SIDES = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}  # 64 pixels each
# Images are independent, so their means give the standard error, also where dropout drops whole
# maps. Five of them: a false alarm in 2e6 channels, of which this file compares some 700.
STANDARD_ERRORS = 5
# What the closed form may be off: expected_activation promises 1e-4 * (1 + |gamma|), |gamma| < 1.5.
INTEGRATION_ERROR = 2.5e-4


class DoubledNorm(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def norm(channels=CHANNELS, axes=2):
    """A batch norm with scales of either sign in (0.5, 1.5) and biases in (-1, 1)."""
    bn = BATCH_NORMS[axes](channels)
    with torch.no_grad():
        bn.weight.copy_((torch.rand(channels) + 0.5) * torch.randn(channels).sign())
        bn.bias.uniform_(-1, 1)
    return bn


def conv(channels=CHANNELS, axes=2):
    return CONVS[axes](channels, 4, 1)


def per_channel_prelu():
    act = nn.PReLU(CHANNELS)
    act.weight.detach().uniform_(-0.5, 0.5)
    return act


def source_of(net):
    """The closed form that the graph shows for `net.conv`; None: it is to be observed."""
    source = sc.convert(net, min_channels=1).conv.mean_source
    return None if isinstance(source, sc.ObservedMean) else source


def assert_mean_is_that_of_real_inputs(net, axes=2):
    """Compare `input_mean` with inputs of the conv, where BN(x) ~ N(bias, weight^2) holds."""
    layer = net.conv
    assert not isinstance(layer.mean_source, sc.ObservedMean)
    seen = []
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].detach().clone()),
        with_kwargs=True,
    )
    net.train()(torch.randn(IMAGES, CHANNELS, *SIDES[axes]))
    by_image = seen[0].flatten(2).mean(dim=2)
    error = by_image.std(dim=0) / math.sqrt(IMAGES)
    difference = (layer.input_mean() - by_image.mean(dim=0)).abs()
    assert (difference <= STANDARD_ERRORS * error + INTEGRATION_ERROR).all(), difference / error


MODULE_ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "hardtanh": nn.Hardtanh,
    "leaky 0.2": lambda: nn.LeakyReLU(0.2),
    "elu": nn.ELU,
    "mish": nn.Mish,
    "softplus": lambda: nn.Softplus(beta=2),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "prelu": nn.PReLU,
    "prelu by channel": per_channel_prelu,
}
RELU_FUNCTIONS = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu in place by position": lambda x: F.relu(x, True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    ".relu()": lambda x: x.relu(),
    ".relu_()": lambda x: x.relu_(),
}
OTHER_FUNCTIONS = {
    "F.silu": F.silu,
    "F.gelu": F.gelu,
    "F.gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "F.relu6": F.relu6,
    "F.hardswish": F.hardswish,
    "F.hardtanh by position": lambda x: F.hardtanh(x, -0.3, 0.6),
    "F.leaky_relu by position": lambda x: F.leaky_relu(x, 0.2),
    "F.leaky_relu by position, in place": lambda x: F.leaky_relu(x, 0.2, True),
    "F.leaky_relu by keyword": lambda x: F.leaky_relu(x, negative_slope=0.2),
    "F.softplus by position": lambda x: F.softplus(x, 2.0, 10.0),
    "torch.sigmoid": torch.sigmoid,
    "F.tanh": F.tanh,
    ".tanh_()": lambda x: x.tanh_(),
}


@pytest.mark.parametrize("name", MODULE_ACTIVATIONS)
def test_activation_module_between_norm_and_conv(name):
    act = MODULE_ACTIVATIONS[name]()
    net = Net(lambda net, x: net.conv(net.act(net.bn(x))), bn=norm(), act=act, conv=conv())
    source = source_of(net)
    assert type(source) is sc.BatchNormMean
    assert source.bn is net.bn
    assert source.act is net.act
    assert_mean_is_that_of_real_inputs(net)


@pytest.mark.parametrize("name", RELU_FUNCTIONS | OTHER_FUNCTIONS)
def test_activation_function_between_norm_and_conv(name):
    act = (RELU_FUNCTIONS | OTHER_FUNCTIONS)[name]
    net = Net(lambda net, x: net.conv(act(net.bn(x))), bn=norm(), conv=conv())
    source = source_of(net)
    assert type(source) is sc.BatchNormMean
    assert source.bn is net.bn
    grid = torch.linspace(-12, 12, 97)
    assert torch.equal(source.act(grid.clone()), act(grid.clone()))  # with its settings
    assert is_relu(source.act) == (name in RELU_FUNCTIONS)  # else Eq. (1) is not used
    unpickled = pickle.loads(pickle.dumps(source.act))
    assert torch.equal(unpickled(grid.clone()), act(grid.clone()))
    assert_mean_is_that_of_real_inputs(net)


@pytest.mark.parametrize(
    ("act", "shown"),
    [
        (lambda x: x.relu(), "batch norm + relu"),
        (lambda x: F.leaky_relu(x, 0.2), "batch norm + leaky_relu(negative_slope=0.2)"),
        (lambda x: F.gelu(x, approximate="tanh"), "batch norm + gelu(approximate='tanh')"),
        (
            lambda x: F.relu6(F.hardtanh(x, -2.0, 2.0)),
            "batch norm + hardtanh(min_val=-2.0, max_val=2.0) + relu6",
        ),
        (lambda x: x, "batch norm"),
    ],
)
def test_source_names_the_activations(act, shown):
    net = Net(lambda net, x: net.conv(act(net.bn(x))), bn=norm(), conv=conv())
    assert repr(source_of(net)) == shown


# Each: forward, further modules, inputs of the conv, and the batch norms behind it, in order.
ACCEPTED = {
    "no activation": (lambda n, x: n.conv(n.bn(x)), {}, 8, ["bn"]),
    "behind a conv": (
        lambda n, x: n.conv(n.bn(n.first(x)).relu()),
        {"first": lambda: nn.Conv2d(8, 8, 1)}, 8, ["bn"],
    ),
    "two activations": (
        lambda n, x: n.conv(n.prelu(torch.tanh(n.bn(x)))), {"prelu": nn.PReLU}, 8, ["bn"],
    ),
    "input by keyword": (lambda n, x: n.conv(input=n.bn(x).relu()), {}, 8, ["bn"]),
    "the norm behind a norm": (lambda n, x: n.conv(n.bn(n.bn2(x)).relu()), {}, 8, ["bn"]),
    "identity, contiguous": (
        lambda n, x: n.conv(n.same(n.bn(x).relu()).contiguous()), {"same": nn.Identity}, 8, ["bn"],
    ),
    "dropout": (lambda n, x: n.conv(n.drop(n.bn(x).relu())), {"drop": nn.Dropout}, 8, ["bn"]),
    "dropout2d": (lambda n, x: n.conv(n.drop(n.bn(x).relu())), {"drop": nn.Dropout2d}, 8, ["bn"]),
    "F.dropout": (lambda n, x: n.conv(F.dropout(n.bn(x).relu(), 0.3)), {}, 8, ["bn"]),
    "average pool": (
        lambda n, x: n.conv(n.pool(n.bn(x).relu())), {"pool": lambda: nn.AvgPool2d(2)}, 8, ["bn"],
    ),
    "average pool that counts no padding": (
        lambda n, x: n.conv(n.pool(n.bn(x).relu())),
        {"pool": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)}, 8, ["bn"],
    ),
    "F.avg_pool2d": (lambda n, x: n.conv(F.avg_pool2d(n.bn(x).relu(), 3, 1)), {}, 8, ["bn"]),
    "adaptive pool": (
        lambda n, x: n.conv(n.pool(n.bn(x).relu())),
        {"pool": lambda: nn.AdaptiveAvgPool2d(3)}, 8, ["bn"],
    ),
    "F.adaptive_avg_pool2d": (
        lambda n, x: n.conv(F.adaptive_avg_pool2d(n.bn(x).relu(), 4)), {}, 8, ["bn"],
    ),
    "concat of branches": (
        lambda n, x: n.conv(torch.cat([n.bn(x).relu(), n.bn2(x), n.bn(x).tanh()], dim=1)),
        {}, 24, ["bn", "bn2", "bn"],
    ),
    "activation behind the concat": (
        lambda n, x: n.conv(F.leaky_relu(torch.cat([n.bn(x).tanh(), n.bn2(x)], 1), 0.2)),
        {}, 16, ["bn", "bn2"],
    ),
    "concat of concats, by keywords": (
        lambda n, x: n.conv(
            torch.concat(tensors=(torch.cat([n.bn(x), n.bn2(x)], axis=1), n.bn2(x).relu()), dim=1)
        ),
        {}, 24, ["bn", "bn2", "bn2"],
    ),
    "pool behind the concat": (
        lambda n, x: n.conv(F.avg_pool2d(torch.cat([n.bn(x).relu(), n.bn2(x).relu()], 1), 2)),
        {}, 16, ["bn", "bn2"],
    ),
    "zero-padded channels": (
        lambda n, x: n.conv(F.pad(n.bn(x).relu(), (0, 0, 0, 0, 1, 3))), {}, 12, ["bn"],
    ),
    "zero-padded channels, by keywords": (
        lambda n, x: n.conv(F.pad(n.bn(x), pad=[0, 0, 0, 0, 0, 4], mode="constant", value=0.0)),
        {}, 12, ["bn"],
    ),
    "activation behind padded channels": (
        lambda n, x: n.conv(torch.sigmoid(F.pad(n.bn(x), (0, 0, 0, 0, 2, 2)))), {}, 12, ["bn"],
    ),
    "prelu behind padded channels": (
        lambda n, x: n.conv(n.act(F.pad(n.bn(x), (0, 0, 0, 0, 2, 2)))),
        {"act": nn.PReLU}, 12, ["bn"],
    ),
    "added into another tensor": (lambda n, x: add_elsewhere(n.bn(x), n.conv), {}, 8, ["bn"]),
    "identity before the activation": (
        lambda n, x: n.conv(n.same(n.bn(x)).contiguous().float().relu()),
        {"same": nn.Identity}, 8, ["bn"],
    ),
    "nearest upsampling": (
        lambda n, x: n.conv(n.up(n.bn(x)).relu()),
        {"up": lambda: nn.Upsample(scale_factor=2)}, 8, ["bn"],
    ),
    "F.interpolate": (lambda n, x: n.conv(F.interpolate(n.bn(x), (16, 11)).tanh()), {}, 8, ["bn"]),
    "bilinear upsampling": (
        lambda n, x: n.conv(n.up(n.bn(x).relu())),
        {"up": lambda: nn.Upsample(scale_factor=2, mode="bilinear")}, 8, ["bn"],
    ),
    "second half of a chunk": (
        lambda n, x: n.conv(n.bn(x).relu().chunk(2, dim=1)[1]), {}, 4, ["bn"],
    ),
    "activation behind a split": (
        lambda n, x: n.conv(torch.split(n.bn(x), [2, 5, 1], 1)[1].tanh()), {}, 5, ["bn"],
    ),
    "slice with a step": (lambda n, x: n.conv(n.bn(x).relu()[:, 1::2]), {}, 4, ["bn"]),
    "slice of a slice": (lambda n, x: n.conv(n.bn(x).narrow(1, 2, 5)[:, 1:3]), {}, 2, ["bn"]),
    "channel shuffle by hand": (
        lambda n, x: n.conv(shuffle(torch.cat([n.bn(x).relu(), n.bn2(x).relu()], 1), 4)),
        {}, 16, ["bn", "bn2"],
    ),
    "channel shuffle, function": (
        lambda n, x: n.conv(F.channel_shuffle(n.bn(x).relu(), 2)), {}, 8, ["bn"],
    ),
    "channel shuffle, module": (
        lambda n, x: n.conv(n.shuffle(n.bn(x)).relu()),
        {"shuffle": lambda: nn.ChannelShuffle(4)}, 8, ["bn"],
    ),
    "shuffled, split and joined": (
        lambda n, x: n.conv(
            torch.cat([shuffle(n.bn(x).relu(), 2).chunk(2, 1)[0], n.bn2(x).chunk(4, 1)[3]], -3)
        ),
        {}, 6, ["bn", "bn2"],
    ),
    "channels reversed and repeated": (
        lambda n, x: n.conv(n.bn(x).relu().flip(1).repeat(1, 2, 1, 1)), {}, 16, ["bn"],
    ),
    "pixels moved into channels": (
        lambda n, x: n.conv(F.pixel_unshuffle(n.bn(x).relu(), 2)), {}, 32, ["bn"],
    ),
    "axes permuted and back": (
        lambda n, x: n.conv(n.bn(x).permute(0, 2, 3, 1).flip(1).permute(0, 3, 1, 2)), {}, 8, ["bn"],
    ),
    "sizes of its own": (
        lambda n, x: n.conv(halves(n.bn(x).relu())[:, 1]), {}, 4, ["bn"],
    ),
    "split before a pool": (
        lambda n, x: n.conv(F.avg_pool2d(n.bn(x).relu(), 2)[:, :4]), {}, 4, ["bn"],
    ),
}  # fmt: skip


def shuffle(x, groups):
    """A channel shuffle as ShuffleNets write it."""
    images, channels, height, width = x.size()
    x = x.view(images, groups, channels // groups, height, width)
    return torch.transpose(x, 1, 2).contiguous().view(images, -1, height, width)


def halves(x):
    return x.view(x.size(0), x.shape[1], x.size(2), -1).unflatten(1, (2, x.shape[1] // 2))


def add_elsewhere(y, layer):
    total = torch.ones_like(y).add_(y)
    return layer(y).sum() + total.sum()


@pytest.mark.parametrize("name", ACCEPTED)
def test_closed_form(name):
    run, modules, inputs, norms = ACCEPTED[name]
    modules = {key: build() for key, build in modules.items()}
    net = Net(run, bn=norm(), bn2=norm(), conv=conv(inputs), **modules)
    source = source_of(net)
    assert [id(bn) for bn in source.batch_norms()] == [id(getattr(net, key)) for key in norms]
    assert_mean_is_that_of_real_inputs(net)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_padded_channels_in_every_dimension(axes):
    pad = (*[0, 0] * axes, 2, 2)
    net = Net(
        lambda n, x: n.conv(F.pad(n.bn(x).relu().flip(1), pad)),
        bn=norm(axes=axes),
        conv=conv(12, axes),
    )
    sc.convert(net)
    assert_mean_is_that_of_real_inputs(net, axes)
    assert net.conv.input_mean()[[0, 1, 10, 11]].tolist() == [0, 0, 0, 0]


def test_source_in_another_dtype():
    net = Net(
        lambda n, x: n.conv(n.act(F.pad(n.bn(x).tanh(), (0, 0, 0, 0, 2, 2)))),
        bn=norm(), act=nn.PReLU(), conv=conv(12),
    )  # fmt: skip
    in_float = sc.convert(copy.deepcopy(net)).conv.input_mean()
    mean = sc.convert(net.double()).conv.input_mean()
    assert mean.dtype == torch.float64
    torch.testing.assert_close(mean.float(), in_float)


def discard(write):
    """Read a batch norm's output after `write` overwrote it, under its old name."""

    def run(net, x):
        y = net.bn(x)
        write(y, x)
        return net.conv(y)

    return run


def overwrite_half(net, x):
    halves = net.bn(x).chunk(2, dim=1)
    halves[0].mul_(2.0)
    return net.conv(halves[0])


def called_twice(net, x):
    return net.conv(net.bn(x)) + net.conv(net.bn2(x))


# Each: forward, further modules, inputs of the conv.
NOT_ACCEPTED = {
    "pool before relu": (lambda n, x: n.conv(F.avg_pool2d(n.bn(x), 2).relu()), {}, 8),
    "dropout before relu": (lambda n, x: n.conv(F.dropout(n.bn(x)).relu()), {}, 8),
    "pool counts its padding": (
        lambda n, x: n.conv(n.pool(n.bn(x))), {"pool": lambda: nn.AvgPool2d(3, padding=1)}, 8,
    ),
    "pool counts its padding, by position": (
        lambda n, x: n.conv(F.avg_pool2d(n.bn(x), 3, 1, 1)), {}, 8,
    ),
    "pool counts its padding, by keyword": (
        lambda n, x: n.conv(F.avg_pool2d(n.bn(x), 3, padding=(1, 1))), {}, 8,
    ),
    "pool with another divisor": (
        lambda n, x: n.conv(n.pool(n.bn(x))),
        {"pool": lambda: nn.AvgPool2d(2, divisor_override=1)}, 8,
    ),
    "F.avg_pool2d with another divisor": (
        lambda n, x: n.conv(F.avg_pool2d(n.bn(x), 2, divisor_override=1)), {}, 8,
    ),
    "max pool": (lambda n, x: n.conv(F.max_pool2d(n.bn(x), 2)), {}, 8),
    "residual sum": (lambda n, x: n.conv((n.bn(x) + n.bn2(x)).relu()), {}, 8),
    "scaled": (lambda n, x: n.conv(n.bn(x).relu() * 2), {}, 8),
    "group norm": (lambda n, x: n.conv(n.gn(x).relu()), {"gn": lambda: nn.GroupNorm(2, 8)}, 8),
    "subclass of batch norm": (
        lambda n, x: n.conv(n.twice(x).relu()), {"twice": lambda: DoubledNorm(8)}, 8,
    ),
    "no norm": (lambda n, x: n.conv(n.first(x).relu()), {"first": lambda: nn.Conv2d(8, 8, 1)}, 8),
    "called twice": (called_twice, {}, 8),
    "spatial padding": (lambda n, x: n.conv(F.pad(n.bn(x), (1, 1, 1, 1))), {}, 8),
    "spatial and channel padding": (
        lambda n, x: n.conv(F.pad(n.bn(x), (1, 1, 0, 0, 2, 2))), {}, 12,
    ),
    "channels padded with ones": (
        lambda n, x: n.conv(F.pad(n.bn(x), (0, 0, 0, 0, 2, 2), value=1.0)), {}, 12,
    ),
    "channels cropped": (lambda n, x: n.conv(F.pad(n.bn(x), (0, 0, 0, 0, 2, -2))), {}, 8),
    "channels padded in another dimension": (
        lambda n, x: n.conv(F.pad(n.bn(x), (0, 0, 2, 2))), {}, 8,
    ),
    "concat of one along an image's axis": (lambda n, x: n.conv(torch.cat([n.bn(x)], 2)), {}, 8),
    "concat along an image's axis": (
        lambda n, x: n.conv(torch.cat([n.bn(x), n.bn2(x)], dim=2)), {}, 8,
    ),
    "concat with zeros": (
        lambda n, x: n.conv(torch.cat([n.bn(x), torch.zeros_like(x)], dim=1)), {}, 16,
    ),
    "concat with a residual sum": (
        lambda n, x: n.conv(torch.cat([n.bn(x), n.bn(x) + n.bn2(x)], dim=1)), {}, 16,
    ),
    "an activation by channel behind a concat": (
        lambda n, x: n.conv(n.act(torch.cat([n.bn(x), n.bn2(x)], dim=1))),
        {"act": lambda: nn.PReLU(16)}, 16,
    ),
    "bilinear before relu": (
        lambda n, x: n.conv(F.interpolate(n.bn(x), scale_factor=2, mode="bilinear").relu()), {}, 8,
    ),
    "channels mixed": (lambda n, x: n.conv(F.pixel_shuffle(n.bn(x), 2)), {}, 2),
    "channels into images": (lambda n, x: n.conv(n.bn(x).reshape(-1, 4, 8, 8)), {}, 4),
    "no channels": (lambda n, x: n.conv(n.bn(x)[:, :0]), {}, 8),
    "channels by pixels": (lambda n, x: n.conv(n.bn(x).transpose(1, 2)), {}, 8),
    "sizes of another tensor": (lambda n, x: n.conv(n.bn(x).view(x.size())), {}, 8),
    "a split of a residual sum": (
        lambda n, x: n.conv((n.bn(x) + n.bn2(x)).chunk(2, dim=1)[0]), {}, 4,
    ),
    "channels by a stored index": (
        lambda n, x: n.conv(n.bn(x)[:, n.order.num_batches_tracked + torch.arange(4)]),
        {"order": lambda: nn.BatchNorm2d(4)}, 4,
    ),
    "an activation by channel behind a split": (
        lambda n, x: n.conv(n.act(n.bn(x)[:, :4])), {"act": lambda: nn.PReLU(4)}, 4,
    ),
    "sum written over, by operator": (discard(lambda y, x: operator.iadd(y, x)), {}, 8),
    "part written over": (discard(lambda y, x: operator.setitem(y, (0, 2), 0.0)), {}, 8),
    "half of it written over": (overwrite_half, {}, 4),
    "written over through a view": (
        discard(lambda y, x: y.view(y.shape).chunk(2, 1)[0].mul_(2.0)), {}, 8,
    ),
    "random slopes": (lambda n, x: n.conv(F.rrelu(n.bn(x))), {}, 8),
    "relu written over its input": (discard(lambda y, x: F.relu(y, inplace=True)), {}, 8),
    "relu written over, by position": (discard(lambda y, x: F.relu(y, True)), {}, 8),
    "relu written over, torch.relu_": (discard(lambda y, x: torch.relu_(y)), {}, 8),
    "sum written over": (discard(lambda y, x: y.add_(x)), {}, 8),
    "module written over": (
        lambda n, x: discard(lambda y, x: n.act(y))(n, x),
        {"act": lambda: nn.ReLU(inplace=True)}, 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ACCEPTED)
def test_everything_else_is_observed(name):
    run, modules, inputs = NOT_ACCEPTED[name]
    modules = {key: build() for key, build in modules.items()}
    net = Net(run, bn=norm(), bn2=norm(), conv=conv(inputs), **modules)
    assert source_of(net) is None


IS_RAW = {
    "the input itself": (True, lambda n, x: n.conv(x), 8),
    "max pool": (True, lambda n, x: n.conv(F.max_pool2d(x, 2)), 8),
    "padding": (True, lambda n, x: n.conv(F.pad(x, (1, 1, 1, 1))), 8),
    "scaling": (True, lambda n, x: n.conv((x - 0.5) / 0.25), 8),
    "concat with features": (True, lambda n, x: n.conv(torch.cat([n.bn(x), x], dim=1)), 16),
    "sum with features": (True, lambda n, x: n.conv(n.bn(x) + x), 8),
    "second call": (True, lambda n, x: n.conv(n.bn(x)) + n.conv(x), 8),
    "norm": (False, lambda n, x: n.conv(n.bn(x)), 8),
    "norm, function": (False, lambda n, x: n.conv(F.layer_norm(x, x.shape[1:])), 8),
    "activation, module": (False, lambda n, x: n.conv(n.act(x)), 8),
    "activation, function": (False, lambda n, x: n.conv(F.gelu(x)), 8),
    "activation, method": (False, lambda n, x: n.conv(x.tanh()), 8),
    "conv": (False, lambda n, x: n.conv(n.first(x)), 8),
    "conv, function": (False, lambda n, x: n.conv(F.conv2d(x, n.first.weight)), 8),
    "input's size only": (False, lambda n, x: n.conv(F.interpolate(n.bn(x), x.shape[2:])), 8),
    "input's size only, method": (False, lambda n, x: n.conv(n.bn(x).view(x.size())), 8),
    "input's dtype only": (False, lambda n, x: n.conv(n.bn(x).to(x.dtype)), 8),
    "upsampling": (True, lambda n, x: n.conv(F.interpolate(x, scale_factor=2)), 8),
    "slice": (True, lambda n, x: n.conv(torch.cat([x[:, :4], n.bn(x)[:, :4]], 1)), 8),
}


@pytest.mark.parametrize("name", IS_RAW)
def test_raw_input(name):
    is_raw, run, inputs = IS_RAW[name]
    net = Net(run, bn=norm(), act=nn.GELU(), first=nn.Conv2d(8, 8, 1), conv=conv(inputs))
    shown, failure = find_conv_inputs(net)
    assert failure is None
    assert shown[id(net.conv)].is_raw is is_raw


class Forgetful(nn.Module):
    """A model whose forward changes it in every way that tracing could make visible."""

    def __init__(self):
        super().__init__()
        self.bn, self.conv, self.last = norm(), conv(), None
        self.register_buffer("decayed", torch.ones(1))

    def forward(self, x):
        self.last = self.bn(x)
        self.decayed.mul_(0.9)
        self.extra = nn.Identity()
        return self.conv(self.last + torch.ones(1))


def test_tracing_leaves_the_model_as_it_was():
    net = Forgetful()
    attributes = dict(vars(net))
    assert find_conv_inputs(net)[1] is None
    assert vars(net) == attributes
    assert list(net._modules) == ["bn", "conv"]
    assert net.decayed == 1


def test_embedded_words_are_not_raw_input():
    net = Net(
        lambda n, x: n.conv(n.words(x).transpose(1, 2)),
        words=nn.Embedding(20, 8), conv=nn.Conv1d(8, 4, 3),
    )  # fmt: skip
    sc.convert(net, torch.zeros(2, 6, dtype=torch.int64))
    assert isinstance(net.conv, sc.SelectConv1d)


# Modules of timm and torchvision, known by name


TIMM_NORMS = {
    "relu": ({}, "batch norm + ReLU"),
    "silu": ({"act_layer": "silu"}, "batch norm + SiLU"),
    "timm's gelu": ({"act_layer": "gelu"}, "batch norm + GELU"),
    "hard swish": ({"act_layer": "hard_swish"}, "batch norm + Hardswish"),
    "none": ({"apply_act": False}, "batch norm"),
}


@pytest.mark.parametrize("name", TIMM_NORMS)
def test_batch_norm_with_its_activation(name):
    layers = pytest.importorskip("timm", reason="timm is not installed").layers
    options, shown = TIMM_NORMS[name]
    bn = layers.BatchNormAct2d(8, **options)
    bn.bias.detach().uniform_(-1, 1)
    net = Net(lambda n, x: n.conv(n.drop(n.bn(x))), bn=bn, drop=layers.DropPath(0.3), conv=conv())
    assert repr(source_of(net)) == shown
    assert_mean_is_that_of_real_inputs(net)


def test_what_drops_without_keeping_the_mean_is_observed():
    layers = pytest.importorskip("timm", reason="timm is not installed").layers
    bn = layers.BatchNormAct2d(8, drop_layer=lambda: nn.Dropout(0.5))
    assert source_of(Net(lambda n, x: n.conv(n.bn(x)), bn=bn, conv=conv())) is None
    drop = layers.DropPath(0.3, scale_by_keep=False)
    net = Net(lambda n, x: n.conv(n.drop(n.bn(x))), bn=norm(), drop=drop, conv=conv())
    assert source_of(net) is None


def test_stochastic_depth_keeps_the_mean():
    ops = pytest.importorskip("torchvision", reason="torchvision is not installed").ops
    drop = ops.StochasticDepth(0.3, "row")
    net = Net(lambda n, x: n.conv(n.drop(n.bn(x).relu())), bn=norm(), drop=drop, conv=conv())
    assert list(source_of(net).batch_norms()) == [net.bn]
    assert_mean_is_that_of_real_inputs(net)
