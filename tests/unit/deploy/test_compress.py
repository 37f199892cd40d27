"""Compressed models compute what masked ones do, and nothing is kept that nobody reads."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from architectures import ARCHITECTURES
from scrambled import Magnified, assert_compresses_the_same, scramble
from selectconv.core.plan import LayerPlan
from tiny_models import CONVS, Net, assert_same, conv_net, images, outputs, snapshot

ZOO = {
    "densenet40": {"growth_rate": 4, "units": (2, 2, 2)},
    "densenet100": {"growth_rate": 4, "units": (2, 3, 1)},
    "densenet_bc190": {"growth_rate": 6, "units": (2, 2, 2)},
    "densenet121": {"growth_rate": 4, "units": (1, 2, 1, 1)},
    "resnet164": {"width": 8, "blocks": (2, 1, 2)},
    "resnet50": {"width": 8, "blocks": (1, 2, 1, 1)},
    "resnext29": {"width": 4, "blocks": (1, 2, 1), "cardinality": 4},
    "condensenet182": {"growth_rates": (4, 4, 8), "units": (2, 2, 1)},
}
SELECT = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}


def test_a_network_that_magnifies_rounding_is_compressed_with_a_warning():
    torch.manual_seed(0)
    model, (x, _) = Magnified(), images()
    with pytest.warns(sc.SelectConvWarning, match="as much from float64"):
        small = sc.compress(model, x)
    exact = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(small.double()(x.double()), exact)


def test_every_zoo_model_is_here():
    assert set(ZOO) == set(sc.list_models())


@pytest.mark.parametrize("realloc", ["pointwise", "all"])
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name, realloc):
    model = sc.create_model(name, selective=True, realloc=realloc, stem="cifar", **ZOO[name])
    assert_compresses_the_same(scramble(model), torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        (2, {"kernel_size": 1}),
        (2, {"kernel_size": 1, "stride": 2}),
        (2, {"kernel_size": 1, "padding": 1}),
        (2, {"kernel_size": 1, "groups": 2}),
        (2, {"kernel_size": 1, "padding": "same", "bias": False}),
        (2, {"kernel_size": 3}),
        (2, {"kernel_size": 3, "padding": 1}),
        (2, {"kernel_size": (1, 3), "padding": (0, 1), "stride": (1, 2)}),
        (2, {"kernel_size": 3, "padding": "same", "dilation": 2}),
        (2, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
        (2, {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "groups": 4}),
        (2, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
        (1, {"kernel_size": 1}),
        (1, {"kernel_size": 3, "padding": 1, "groups": 2}),
        (3, {"kernel_size": 1}),
        (3, {"kernel_size": 3, "padding": 1}),
    ],
)
def test_one_layer(axes, settings):
    layer = SELECT[axes](12, 8, **settings)
    model = nn.Sequential(CONVS[axes](3, 12, 1), nn.ReLU(), layer)
    for seed in range(3):
        scramble(model, seed=seed)
        assert_compresses_the_same(model, torch.randn(2, 3, *[6, 7, 5][:axes]))


def test_shifts_out_of_the_frame_read_zeros():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), sc.SelectConv2d(4, 4, 1))
    layer = model[1]
    layer.shift.detach().copy_(torch.tensor([[0.0, 40.5], [4.5, 0.0], [-5.0, 1.0], [1e6, 0.0]]))
    layer.shifted.fill_(True)
    small = assert_compresses_the_same(model.eval(), torch.randn(2, 3, 5, 5))
    assert small.get_submodule("1").in_channels == 1  # only the second slot reads anything
    small = assert_compresses_the_same(model.eval(), torch.randn(2, 3, 5, 5), round_to=8)
    assert small.get_submodule("1").in_channels == 8  # a whole block


@pytest.mark.parametrize("groups", [1, 3])
def test_shifted_slots_are_joined_to_the_others_and_read_by_one_conv(groups):
    layer = sc.SelectConv2d(12, 9, 3, padding=1, groups=groups)
    model = nn.Sequential(nn.Conv2d(3, 12, 1), layer, nn.BatchNorm2d(9))
    layer.shift.detach()[[1, 2, 9]] = torch.tensor([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]])
    layer.shifted[[1, 2, 9]] = True
    small = assert_compresses_the_same(model.eval(), torch.randn(2, 3, 6, 5))
    called = [node.target for node in small.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1_stencil", "1", "2"]
    assert small.get_submodule("1").groups == groups
    assert tuple(small.get_submodule("1_stencil").kernel_size) == (5, 5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("drift", [0.0, 1e-7])
def test_whole_shifts_are_copies_without_weights_or_multiply_adds(groups, drift):
    layer = sc.SelectConv2d(12, 9, 1, groups=groups)
    model, x = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU(), layer).eval(), torch.randn(2, 3, 6, 5)
    plain = sc.count(model, x)
    slots = torch.tensor([1, 2, 6, 7, 9, 10])
    offsets = torch.tensor([[0.0, 1.0], [-1.0, 1.0], [0.0, 1.0], [2.0, 0.0], [1.0, -1.0], [0, 1]])
    plan = LayerPlan(slots, slots, torch.tensor([0, 0, 3, 3, 4, 4]), offsets + drift, weight_seed=0)
    layer.apply_plan(plan)
    small = assert_compresses_the_same(model, x)
    called = [node.target for node in small.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1", "2"]  # no stencil
    # A pad for each offset, and one more for that of two pixels.
    assert sum(node.target is F.pad for node in small.graph.nodes) == 5
    assert sc.count(model, x).macs <= plain.macs
    assert small.get_submodule("2").in_channels == 12
    for size in (1, 2):  # of any size
        part = x[:, :, :size, :size]
        torch.testing.assert_close(small(part), model(part))


def test_a_chain_loses_filters_and_norm_entries():
    model = conv_net()
    model.conv1.close([0, 3, 4])
    model.conv2.close([1, 2])
    small = assert_compresses_the_same(model.eval(), images()[0])
    shapes = {name: tuple(value.shape) for name, value in small.named_parameters()}
    assert shapes.items() >= {
        ("stem.weight", (9, 3, 3, 3)),
        ("norm1.weight", (9,)),
        ("conv1.weight", (10, 9, 1, 1)),
        ("norm2.bias", (10,)),
        ("conv2.weight", (12, 10, 3, 3)),
    }
    assert not any(node.target is torch.index_select for node in small.graph.nodes)


def test_round_to_keeps_more():
    model = conv_net(width=24)
    model.conv1.close(range(11))
    model.conv2.close(range(3, 20))
    small = assert_compresses_the_same(model.eval(), images()[0], round_to=8)
    assert small.get_submodule("stem").out_channels == 16
    assert tuple(small.get_submodule("conv1").weight.shape) == (8, 16, 1, 1)


def test_round_to_where_channels_are_gathered():
    model = scramble(
        sc.create_model("densenet40", selective=True, growth_rate=8, units=(2, 2, 1)), moved=0.0
    )
    small = assert_compresses_the_same(model, torch.randn(1, 3, 8, 8), round_to=8)
    convs = [conv for conv in small.modules() if isinstance(conv, nn.Conv2d)]
    assert {conv.in_channels % 8 for conv in convs if conv.kernel_size == (1, 1)} == {0}


def test_gathers_only_where_that_pays():
    model = sc.create_model("densenet40", selective=True, growth_rate=8, units=(2, 2, 1)).eval()
    x = torch.randn(1, 3, 8, 8)
    for closed, gathers in (range(1), 0), (range(12), 1):
        model.blocks[0][1].pointwise.conv.close(closed)
        small = assert_compresses_the_same(model, x)
        assert sum(node.target is torch.index_select for node in small.graph.nodes) == gathers


def test_layers_closed_entirely_are_constant():
    model = conv_net().eval()
    model.conv2.close(range(12))
    small = assert_compresses_the_same(model, images()[0])
    assert small.get_submodule("conv2").in_channels == 1


def test_copies_of_a_channel_are_merged():
    model = conv_net().eval()
    model.conv1.index.fill_(5)
    small = assert_compresses_the_same(model, images()[0])
    assert tuple(small.get_submodule("conv1").weight.shape) == (12, 1, 1, 1)
    assert small.get_submodule("stem").out_channels == 1


def select(inputs=8, outputs=8, kernel=1, **settings):
    return sc.SelectConv2d(inputs, outputs, kernel, padding=kernel // 2, **settings)


def squeeze_excite(net, x):
    x = F.silu(net.norm(net.a(x)))
    gate = net.expand(F.relu(net.reduce(x.mean((2, 3), keepdim=True))))
    return net.b(x * gate.sigmoid())


def shared(net, x):
    x = net.relu(net.a(x))
    return net.b(net.relu(net.b(net.relu(net.c(x)))) + x)


def in_place(net, x):
    y = net.norm(net.a(x))
    z = y.relu_()
    y.add_(1)
    return net.b(z) + net.c(F.relu(y, True)) + y


def residuals(net, x):
    x = net.a(x)
    x = x + net.b(F.relu(x))
    x = F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 2, 6))
    x = x + net.d(net.norm16(x).relu())
    return net.e(F.max_pool2d(x, 2))


def concats(net, x):
    x = net.a(x)
    y = torch.cat([x, net.b(x)], 1)
    z = torch.cat([y, net.c(net.d16(net.norm16(y)).relu())], dim=1)
    return net.f(z.relu()), y.mean()


def shapes(net, x):
    x = net.a(x)
    b, c, h, w = x.shape
    x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
    return net.b(x).flatten(1).view(x.size(0), -1)


def scaled(net, x):
    x = net.a(x) * net.scale + net.offset
    return net.b(net.prelu(net.c(F.interpolate(x, scale_factor=2.0))))


def resized(net, x):
    h = net.a(x)
    sizes = (h.size(-2), h.shape[-1]), h.size()[2:], h.shape[-2:]
    return sum(F.interpolate(net.side(x), size=size) for size in sizes) + net.b(h.relu())


GRAPHS = {
    "squeeze-excite": (
        squeeze_excite,
        {"norm": nn.BatchNorm2d(8), "reduce": nn.Conv2d(8, 2, 1), "expand": nn.Conv2d(2, 8, 1)},
    ),
    "shared": (shared, {"relu": nn.ReLU(inplace=True), "c": select()}),
    "in place": (in_place, {"norm": nn.BatchNorm2d(8), "c": select()}),
    "residuals": (
        residuals,
        {"norm16": nn.BatchNorm2d(16), "d": select(16, 16, 3), "e": select(16, 4)},
    ),
    "concats": (
        concats,
        {
            "norm16": nn.BatchNorm2d(16),
            "c": select(),
            "d16": select(16),
            "f": select(24, 4, 3),
        },
    ),
    "shapes": (shapes, {}),
    "logic": (lambda net, x: net.b(net.a(x) * ((x[:, :1] > 0) | (x[:, :1] < -1))), {}),
    "depthwise": (
        lambda net, x: net.b(net.norm(net.depth(F.relu6(net.a(x)))).relu()),
        {"depth": nn.Conv2d(8, 8, 3, padding=1, groups=8), "norm": nn.BatchNorm2d(8)},
    ),
    "groups": (
        lambda net, x: net.b(F.hardswish(net.grouped(net.a(x).relu()))),
        {"grouped": select(8, 8, 3, groups=2)},
    ),
    "scaled": (scaled, {"c": select(), "prelu": nn.PReLU(8)}),
    "type of a weight": (lambda net, x: net.b(net.a(x).relu().to(net.b.weight.dtype)), {}),
    "layer scale": (
        lambda net, x: net.b(net.gain.unsqueeze(-1).unsqueeze(-1) * net.a(x).relu()),
        {},
    ),
    "a conv of a constant": (
        lambda net, x: net.b(net.a(x)) + net.c(net.coordinates),
        {"c": select(2)},
    ),
    "a constant among others": (
        lambda net, x: (
            net.b(net.a(x)) + net.c(torch.cat([net.a(x[:1]).relu(), net.coordinates], 1))
        ),
        {"c": select(10)},
    ),
    "sizes alone": (resized, {"side": nn.Conv2d(3, 8, 3, stride=2)}),
    "sizes of a weight": (
        lambda net, x: net.b(net.c(net.a(x)).relu()) * net.c.weight.shape[0],
        {"c": select()},
    ),
    "values of a weight": (
        lambda net, x: net.b(net.c(net.a(x)).relu()) * net.c.weight.mean(),
        {"c": nn.Conv2d(8, 8, 1)},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    run, modules = GRAPHS[name]
    net = Net(run, a=nn.Conv2d(3, 8, 3, padding=1), b=select(), **modules)
    if name == "scaled":
        net.scale = nn.Parameter(torch.randn(8, 1, 1))
        net.register_buffer("offset", torch.randn(1, 8, 1, 1))
    net.gain = nn.Parameter(torch.rand(8))
    net.register_buffer("coordinates", torch.randn(1, 2, 8, 8))
    single = net
    if name == "concats":
        single = Net(lambda outer, x: sum(outer.net(x)), net=net)
    for seed in range(3):
        scramble(single, seed=seed, closed=0.6)
        assert_compresses_the_same(single, torch.randn(2, 3, 8, 8))


def test_what_is_compressed_under_inference_mode_can_be_trained():
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        small = sc.compress(nn.Sequential(nn.Conv2d(3, 8, 3), select()), x)
    small(x).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


class AnyArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), select()
        self.order = nn.Parameter(torch.randperm(8), requires_grad=False)

    def compute(self, x):
        return self.b(torch.index_select(self.a(x).relu(), 1, self.order))


class ByName(AnyArguments):
    def forward(self, x, **unused):
        return self.compute(x)


class ByPlace(AnyArguments):
    def forward(self, *inputs):
        return self.compute(inputs[0])


@pytest.mark.parametrize("kind", [ByName, ByPlace])
def test_forwards_that_take_any_arguments(kind, tmp_path):
    model = scramble(kind())
    x = torch.randn(2, 3, 8, 8)
    small = sc.compress(model, x)
    sc.save_compressed(small, tmp_path / "small.safetensors")
    assert torch.equal(sc.load_compressed(tmp_path / "small.safetensors")(x), small(x))
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)


def test_sizes_alone_need_no_channels():
    net = Net(
        resized, a=nn.Conv2d(3, 8, 3, padding=1), b=select(), side=nn.Conv2d(3, 8, 3, stride=2)
    )
    net.b.close(range(4))
    small = sc.compress(net.eval(), torch.randn(1, 3, 8, 8))
    assert sorted(conv.out_channels for conv in small.modules() if isinstance(conv, nn.Conv2d)) == [
        4,
        8,
        8,
    ]


def test_compressing_again_changes_nothing():
    model = scramble(
        sc.create_model("densenet40", selective=True, growth_rate=8, units=(3, 2, 1)), closed=0.6
    )
    small = assert_compresses_the_same(model, torch.randn(1, 3, 8, 8))
    again = assert_compresses_the_same(small, torch.randn(1, 3, 8, 8))
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in small.parameters())


def compressed(name):
    """A converted and compressed network of another library, and an input of it."""
    architecture = ARCHITECTURES[name]
    model = architecture.create().eval()
    x = torch.randn(2, 3, architecture.side, architecture.side)
    scramble(sc.convert(model, x, realloc="pointwise"), closed=0.5, moved=0.2)
    return assert_compresses_the_same(model, x), x


@pytest.mark.parametrize(
    "name", ["dense, norms that activate", "squeeze-excite", "depthwise, hard swish", "shuffle"]
)
def test_a_compressed_model_is_plain(name, tmp_path):
    small, x = compressed(name)
    y = small(x).detach()
    leaves = [module for module in small.modules() if not list(module.children())]
    assert all(type(module).__module__.startswith("torch.nn") for module in leaves)
    assert torch.equal(copy.deepcopy(small)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(small))(x), y)
    double = copy.deepcopy(small).to(torch.float64)(x.double())
    torch.testing.assert_close(double.float(), y, rtol=1e-3, atol=float(1e-4 * y.abs().max()))
    assert copy.deepcopy(small).to("meta")(x.to("meta")).shape == y.shape
    sc.save_compressed(small, tmp_path / "small")
    torch.testing.assert_close(sc.load_compressed(tmp_path / "small")(x), y)
    small.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_filters_of_a_functional_conv_are_removed():
    class Same(nn.Conv2d):  # as in timm's Conv2dSame
        def forward(self, x):
            x = F.pad(x, (0, 1, 1, 0))
            return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), groups=self.groups)

    model = nn.Sequential(Same(3, 8, 2), nn.ReLU(), Same(8, 8, 2), nn.ReLU(), select())
    model[4].close([0, 1, 5])
    small = assert_compresses_the_same(model.eval(), torch.randn(2, 3, 6, 6))
    shapes = [tuple(conv.weight.shape) for conv in small.modules() if isinstance(conv, nn.Conv2d)]
    assert shapes == [(8, 3, 2, 2), (5, 8, 2, 2), (8, 5, 1, 1)]


def test_a_functional_conv_that_is_called_twice_stays_one():
    def run(net, x):
        for _ in range(2):
            x = F.conv2d(x, net.c.weight, net.c.bias, padding=1).relu()
        return net.b(x) * F.conv2d(x, net.scale)

    net = Net(run, b=select(3), c=nn.Conv2d(3, 3, 3))
    net.register_buffer("scale", torch.ones(1, 3, 1, 1))  # no parameter: it stays a function
    small = assert_compresses_the_same(scramble(net), torch.randn(2, 3, 6, 6))
    assert [name for name, _ in small.named_parameters() if "conv" in name] == [
        "_conv2d.weight",
        "_conv2d.bias",
    ]


def test_the_model_is_left_as_it_is():
    model = scramble(conv_net()).train()
    model.conv2.mean_source = sc.ObservedMean()
    before, y = snapshot(model), outputs(model)
    modules = dict(model.named_modules())
    sc.compress(model, torch.ones(2, 3, 8, 8))
    sc.count(model, torch.ones(2, 3, 8, 8))
    assert_same(snapshot(model), before)
    assert torch.equal(outputs(model), y)
    assert dict(model.named_modules()) == modules
    assert all(module.training for module in model.modules())


def test_arguments_by_name_and_several_of_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), select()

        def forward(self, x, y, scale=2.0):
            return {"sum": self.b(self.a(x).relu()) * scale, "other": y}

    model = scramble(Two())
    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 1)
    for example in ((x, y), {"x": x, "y": y}):
        torch.testing.assert_close(sc.compress(model, example)(x=x, y=y), model(x, y))


def test_float64_keeps_its_digits():
    model = scramble(conv_net()).double()
    x = images()[0].double()
    torch.testing.assert_close(sc.compress(model, x)(x), model(x), rtol=1e-12, atol=1e-12)


def test_hooks_are_not_traced():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), select()).eval()
    seen = []
    net[0].register_forward_hook(lambda module, inputs, y: seen.append(y.mean().item()))
    assert_compresses_the_same(net, torch.randn(1, 3, 4, 4))
    net[0].register_forward_hook(lambda module, inputs, y: y + 1)
    with pytest.raises(sc.CompressionError, match=r"output 0 of the compressed model .*differs"):
        sc.compress(net, torch.randn(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (3, {}, TypeError, "`model` must be an nn.Module, got int"),
        (conv_net(convert=False), {"round_to": 0}, ValueError, "`round_to` must be at least 1"),
        (conv_net(convert=False), {"round_to": 1.5}, TypeError, "`round_to` must be an integer"),
        (nn.Conv2d(2, 2, 1), {}, sc.CompressionError, "`example_input`: the model fails on it"),
    ],
)
def test_refuses_bad_arguments(model, options, error, message):
    with pytest.raises(error, match=message):
        sc.compress(model, torch.zeros(1, 3, 8, 8), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_compared_by_its_own_digits(dtype, seed):
    torch.manual_seed(seed)
    x = images(2)[0]
    model = scramble(conv_net(), seed=seed)
    small = sc.compress(model.to(dtype), x.to(dtype))
    assert next(small.parameters()).dtype == dtype
    with torch.no_grad():
        want, got = model(x.to(dtype)).float(), small(x.to(dtype)).float()
    assert (want - got).abs().max() < 0.1 * want.abs().max()


def test_outputs_of_minus_infinity_are_equal():
    x = images(2)[0]

    def run(net, x):
        return torch.cat([net.inner(x), torch.full_like(x[:, :1, 0, 0], -torch.inf)], 1)

    model = scramble(Net(run, inner=conv_net()))
    small = sc.compress(model, x)
    assert torch.equal(small(x).isinf(), model(x).isinf())
