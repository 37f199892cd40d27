"""`sc.convert` and `sc.describe`: what is swapped, what is kept, what is refused and why."""

import copy
import random
import warnings
from collections import OrderedDict
from dataclasses import astuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import selectconv as sc
from selectconv.core.layer import SelectConvNd
from tiny_models import BATCH_NORMS, CONVS, Net

LAYERS = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}


class MyConv(nn.Conv2d):
    def forward(self, input):
        return super().forward(input)


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Scaled(nn.Conv2d):
    def scale(self):  # a model may call it
        return 2.0


class Conv3x3(nn.Conv2d):
    """A subclass that computes what torch's conv computes."""

    def __init__(self, width):
        super().__init__(width, width, 3, padding=1)
        self.note = self._note()

    def _note(self):
        return "mine"

    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)


def small_net(axes=2, **options):
    """A stem on raw input, a 3x3 and a 1x1 conv behind batch norms, with dropout between."""
    norm, conv = BATCH_NORMS[axes], CONVS[axes]
    return nn.Sequential(
        OrderedDict(
            stem=conv(3, 16, 3, padding=1),
            norm1=norm(16),
            relu1=nn.ReLU(),
            spatial=conv(16, 16, 3, padding=1, **options),
            norm2=norm(16),
            act2=nn.SiLU(inplace=True),
            drop=nn.Dropout(0.3),
            pointwise=conv(16, 4, 1),
        )
    )


def image(axes=2, channels=3):
    return torch.randn(2, channels, *(6, 5, 4)[:axes])


def selective(model):
    return {name for name, module in model.named_modules() if isinstance(module, SelectConvNd)}


def reason(model, name="conv"):
    return {row.name: row.skipped for row in sc.describe(model)}[name]


def state_of(model):
    """Everything that a failed or repeated call must leave as it was."""
    return (
        [(name, type(module), module.training) for name, module in model.named_modules()],
        [(name, id(value)) for name, value in [*model.named_parameters(), *model.named_buffers()]],
        {name: value.tolist() for name, value in model.state_dict().items()},
        [len(module._forward_hooks) for module in model.modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
    )


# What is swapped


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_eligible_convs_become_selective_layers(axes):
    model = small_net(axes)
    assert sc.convert(model, image(axes)) is model
    assert [type(model[name]) for name in (0, 3, 7)] == [CONVS[axes], LAYERS[axes], LAYERS[axes]]
    assert model.spatial.mean_source.bn is model.norm1
    assert model.spatial.mean_source.act is model.relu1
    assert model.pointwise.mean_source.bn is model.norm2
    assert model.spatial.shift.shape == (16, axes)


def test_a_forward_that_depends_on_shapes_is_observed():
    def run(net, x):
        x = net.bn(net.stem(x)).relu()
        return net.conv(x.sigmoid() if x.shape[-1] > 16 else x)

    net = Net(run, stem=nn.Conv2d(3, 8, 1), bn=nn.BatchNorm2d(8), conv=nn.Conv2d(8, 8, 1))
    sc.convert(net, torch.randn(2, 3, 20, 20))
    # The mean is that of what was seen, not of the way that the example took.
    narrow = torch.randn(2, 3, 8, 8)
    net(narrow)
    seen = net.bn(net.stem(narrow)).relu().mean((0, 2, 3))
    torch.testing.assert_close(net.conv.input_mean(), seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("realloc", "may"),
    [("all", (True, True)), ("pointwise", (False, True)), ("none", (False, False))],
)
def test_realloc_chooses_the_convs_that_may_reallocate(realloc, may):
    model = sc.convert(small_net(), realloc=realloc)
    assert (model.spatial.shift is not None, model.pointwise.shift is not None) == may


def test_where_chooses_among_the_eligible():
    asked = []
    model = small_net()
    plain = dict(model.named_modules())

    def where(name, conv):
        asked.append(name)
        assert conv is plain[name]
        return name == "pointwise"

    assert selective(sc.convert(model, where=where)) == {"pointwise"}
    assert asked == ["spatial", "pointwise"]  # not the stem
    assert reason(model, "spatial") == "left out by `where`"


def test_shared_conv_becomes_one_shared_layer():
    shared = nn.Conv2d(8, 8, 1)
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norms[0], shared, norms[1], nn.Sequential(shared))
    sc.convert(model)
    assert isinstance(model[2], sc.SelectConv2d)
    assert model[4][0] is model[2]
    assert isinstance(model[2].mean_source, sc.ObservedMean)
    assert len(sc.describe(model)) == 2


def test_plain_convs_that_were_added_later():
    model = sc.convert(small_net())
    first = model.spatial
    model.add_module("norm3", nn.BatchNorm2d(4))
    model.add_module("late", nn.Conv2d(4, 8, 1))
    sc.convert(model, min_channels=4)
    assert selective(model) == {"spatial", "pointwise", "late"}
    assert model.spatial is first
    assert model.late.mean_source.bn is model.norm3


def test_second_conversion_warns_and_changes_nothing():
    model = sc.convert(small_net())
    before = state_of(model)
    with pytest.warns(sc.SelectConvWarning, match="already converted; nothing was changed"):
        assert sc.convert(model) is model
    assert state_of(model) == before


# What is kept


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"groups": 4}, {"stride": 2}, {"bias": False}], ids=str)
def test_outputs_are_bit_equal(training, options):
    model = small_net(**options).train(training)
    plain = copy.deepcopy(model)
    sc.convert(model, image())
    x = image()
    outputs = []
    for net in (plain, model):
        torch.manual_seed(3)
        outputs.append(net(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    torch.testing.assert_close(
        {name: p.grad for name, p in model.named_parameters() if not name.endswith("shift")},
        {name: p.grad for name, p in plain.named_parameters()},
    )


def test_mixed_training_flags_are_kept():
    model = small_net()
    model.norm1.eval()
    model.spatial.eval()
    flags = {name: module.training for name, module in model.named_modules()}
    sc.convert(model, image())
    assert {name: module.training for name, module in model.named_modules()} == flags


@pytest.mark.parametrize("where", [torch.float64, torch.bfloat16, "meta"])
def test_dtype_and_device_are_kept(where):
    model = small_net().to(where)
    before = {(value.dtype, value.device) for value in model.parameters()}
    sc.convert(model)
    assert {(value.dtype, value.device) for value in model.parameters()} == before


@pytest.mark.parametrize("example", [None, image()], ids=["no example", "example"])
def test_statistics_and_random_numbers_are_not_touched(example):
    noisy = Net(
        lambda n, x: n.conv(F.dropout(n.norm(n.first(x)), 0.5) * torch.rand(1)),
        first=small_net(), norm=nn.BatchNorm2d(4), conv=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    statistics = {name: value.clone() for name, value in noisy.named_buffers()}
    random_state = torch.get_rng_state()
    sc.convert(noisy, example)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [name for name in statistics if (noisy.get_buffer(name) != statistics[name]).any()] == []


# What is skipped


def chain(*modules):
    """A net that ends in `modules`, of which the last is called conv, and has an eligible conv."""
    names = [*(f"m{number}" for number in range(len(modules) - 1)), "conv"]
    head = [("stem", nn.Conv2d(3, 16, 1)), ("norm", nn.BatchNorm2d(16)), ("relu", nn.ReLU())]
    eligible = ("eligible", nn.Conv2d(16, 16, 1))
    return nn.Sequential(OrderedDict([*head, eligible, *zip(names, modules, strict=True)]))


def patched():
    conv = nn.Conv2d(16, 16, 1)
    conv.forward = conv.forward
    return chain(conv)


def tied():
    first, second = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
    second.weight = first.weight
    return chain(first, second)


def raw(run, width=16):
    """A net of 16-channel images whose conv sees them through `run`."""

    def forward(net, x):
        return net.eligible(net.norm(x)), net.conv(run(net, x))

    return Net(
        forward,
        norm=nn.BatchNorm2d(16), eligible=nn.Conv2d(16, 4, 1), conv=nn.Conv2d(width, 4, 1),
    )  # fmt: skip


SKIPPED = {
    "depthwise": (lambda: chain(nn.Conv2d(16, 16, 3, groups=16)), "depthwise"),
    "depthwise with a multiplier": (lambda: chain(nn.Conv2d(16, 32, 3, groups=16)), "depthwise"),
    "transposed": (lambda: chain(nn.ConvTranspose2d(16, 16, 3)), "transposed"),
    "subclass": (
        lambda: chain(MyConv(16, 16, 3)), "a subclass (MyConv) may compute something else",
    ),
    "subclass with methods of its own": (
        lambda: chain(Scaled(16, 16, 3)), "a subclass (Scaled) may compute something else",
    ),
    "subclass with weights of its own": (
        lambda: chain(Standardised(16, 16, 3)),
        "a subclass (Standardised) may compute something else",
    ),
    "parametrised": (
        lambda: chain(parametrizations.weight_norm(nn.Conv2d(16, 16, 3))), "parametrised weight",
    ),
    "pruned": (
        lambda: chain(prune.l1_unstructured(nn.Conv2d(16, 16, 3), "weight", 0.5)),
        "its weight is recomputed by a hook",
    ),
    "patched": (patched, "its forward is patched"),
    "few channels": (
        lambda: chain(nn.Conv2d(16, 4, 1), nn.Conv2d(4, 4, 1)),
        "4 inputs, fewer than min_channels=8",
    ),
    "tied": (tied, "shares its weight with another module"),
    "raw input": (lambda: raw(lambda n, x: x), "fed with raw input"),
    "raw input, pooled": (lambda: raw(lambda n, x: F.max_pool2d(x, 2)), "fed with raw input"),
    "raw input, padded": (lambda: raw(lambda n, x: F.pad(x, (1, 1))), "fed with raw input"),
    "raw input, concatenated": (
        lambda: raw(lambda n, x: torch.cat([x, n.norm(x)], dim=1), 32), "fed with raw input",
    ),
}  # fmt: skip


def test_a_subclass_with_the_forward_of_torch_becomes_selective():
    model, x = chain(Conv3x3(16)).eval(), image()
    before, weight = model(x), model.conv.weight
    sc.convert(model, x)
    assert type(model.conv) is sc.SelectConv2d
    assert (model.conv.note, model.conv.weight is weight) == ("mine", True)
    assert torch.equal(model(x), before)
    model.conv.close(range(8))
    assert sc.compress(model, x).get_submodule("eligible").out_channels == 8


@pytest.mark.parametrize("name", SKIPPED)
def test_skipped_with_a_reason(name):
    build, why = SKIPPED[name]
    model = build()
    conv = model.conv
    sc.convert(model)
    assert model.conv is conv
    assert isinstance(model.eligible, sc.SelectConv2d)
    assert reason(model) == why
    assert why in str(sc.describe(model))


@pytest.mark.parametrize("example", [None, image()], ids=["no example", "example"])
def test_convs_on_1x1_maps_are_skipped_where_an_example_shows_them(example):
    model = sc.convert(chain(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1)), example)
    assert isinstance(model.eligible, sc.SelectConv2d)
    why = None if example is None else "works on 1x1 maps only: nothing to shift"
    assert reason(model) == why


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)])
def test_conv_that_also_sees_larger_maps_is_not_skipped(sizes):
    net = Net(
        lambda n, x: [n.conv(F.adaptive_avg_pool2d(n.stem(x), size)).sum() for size in sizes],
        stem=nn.Conv2d(3, 8, 1), conv=nn.Conv2d(8, 8, 1),
    )  # fmt: skip
    assert selective(sc.convert(net, image())) == {"conv"}


class TwoInputs(nn.Module):
    """Data-dependent control flow, so that only the example shows that `conv` sees raw input."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.eligible = (
            nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1),
        )  # fmt: skip

    def forward(self, x, scale):
        return self.eligible(self.norm(self.conv(x))) * scale if scale > 0 else self.conv(x)


@pytest.mark.parametrize(
    "example",
    [
        (image(channels=16), 2.0),
        [image(channels=16), 2.0],
        {"scale": 2.0, "x": image(channels=16)},
    ],
    ids=["tuple", "list", "dict"],
)
def test_example_input_of_several_arguments(example):
    model = TwoInputs()
    sc.convert(model, example)
    assert selective(model) == {"eligible"}
    assert reason(model) == "fed with raw input"


# Wrappers


def test_model_inside_torch_compile_is_converted():
    model, x = small_net().eval(), image()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)  # so that there is compiled code to forget
    assert sc.convert(compiled, x) is compiled
    assert [row.name for row in sc.describe(compiled)] == ["stem", "spatial", "pointwise"]
    assert torch.equal(compiled(x), before)
    model.spatial.close(range(8))
    assert torch.equal(compiled(x), model(x))
    assert not torch.equal(compiled(x), before)


def test_lazy_convs():
    def lazy():
        return nn.Sequential(
            nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(8, 1)
        )

    why = "not initialised: give `example_input`, or run the model once"
    with pytest.raises(sc.ConversionError, match=f"0: {why}; 3: {why}"):
        sc.convert(lazy())
    rows = sc.describe(lazy())
    assert [(row.shape, row.skipped) for row in rows] == [((), why), ((), why)]
    assert why in str(rows)
    model = sc.convert(lazy(), image())
    assert selective(model) == {"3"}
    assert model[3].mean_source.bn is model[1]


# What is refused, and leaves the model as it was


def assert_refused(model, error, match, *args, **kwargs):
    model.train()
    if isinstance(model, nn.Sequential) and len(model):
        model[0].eval()
    before = state_of(model)
    with pytest.raises(error, match=match) as caught:
        sc.convert(model, *args, **kwargs)
    assert state_of(model) == before
    return caught.value


def test_example_of_a_wrong_shape():
    match = "`example_input`: the model fails on it with"
    error = assert_refused(small_net(), sc.ConversionError, match, torch.zeros(1, 5, 8, 8))
    assert str(error.__cause__) in str(error)


REFUSED = {
    "nothing eligible": (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)),
        {}, sc.ConversionError, "none of the 2 convs .*: 0: 3 inputs, .*; 2: depthwise",
    ),
    "all left out": (
        small_net(), {"where": lambda *_: False}, sc.ConversionError,
        "none of the 3 convs .*spatial: left out by `where`",
    ),
    "many": (
        nn.Sequential(*(nn.Conv2d(2, 2, 1) for _ in range(9))), {}, sc.ConversionError,
        r"none of the 9 convs .*; 4: 2 inputs, fewer than min_channels=8 and 4 more\.$",
    ),
    "too few channels": (
        small_net(), {"min_channels": 17}, sc.ConversionError, "16 inputs, .*min_channels=17",
    ),
    "no convs": (nn.Sequential(nn.Linear(3, 3)), {}, sc.ConversionError, "none of the 0 convs"),
    "a conv": (nn.Conv2d(16, 16, 1), {}, sc.ConversionError, r"\(model\): is the model itself"),
    "parallel": (nn.DataParallel(small_net()), {}, sc.ConversionError, "wrapped in DataParallel"),
    "no channels": (small_net(), {"min_channels": 0}, ValueError, "`min_channels` .* got 0"),
    "half a channel": (small_net(), {"min_channels": 8.5}, TypeError, "`min_channels` .* got 8.5"),
    "misspelt": (small_net(), {"realloc": "pointwize"}, ValueError, "Did you mean 'pointwise'"),
    "failing": (small_net(), {"where": lambda name, _: {}[name]}, KeyError, "spatial"),
    "no function": (small_net(), {"where": 3}, TypeError, "`where` must be a function, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, options, error, match = REFUSED[name]
    assert_refused(model, error, match, **options)


# describe


def test_describe_lists_and_prints():
    model = sc.convert(small_net(), realloc="all")
    model.spatial.close([1, 2, 3])
    model.spatial.realloc(top_k=1)
    model.spatial.close([2, 5])
    stem, spatial, pointwise = rows = sc.describe(model)
    why, gamma = "3 inputs, fewer than min_channels=8", model.spatial.smallest_gamma()
    assert astuple(stem)[:-1] == ("stem", (16, 3, 3, 3), None, why, 3, 0, 0, None)
    source = "batch norm + ReLU"
    assert astuple(spatial) == ("spatial", (16, 16, 3, 3), source, None, 14, 2, 2, gamma, None)
    assert (pointwise.open, pointwise.closed, pointwise.moved) == (16, 0, 0)
    *table, summary = str(rows).splitlines()
    assert [line.split()[0] for line in table] == ["conv", "stem", "spatial", "pointwise"]
    assert table[2].split() == f"spatial 16x16x3x3 {source} 14 2 2 {gamma:.2g}".split()
    assert f"plain: {why}" in table[1]
    assert summary.startswith("2 of 3 convs selective; of 32 slots 2 closed, 2 re-allocated; ")


def test_describe_of_plain_models():
    model = nn.Sequential(small_net(), nn.Conv2d(4, 4, 1, groups=4))
    rows = sc.describe(model)
    assert [row.skipped for row in rows] == [
        "3 inputs, fewer than min_channels=8", "not converted", "not converted", "depthwise",
    ]  # fmt: skip
    assert str(rows).endswith("0 of 4 convs selective; of 0 slots 0 closed, 0 re-allocated")
    assert len(sc.describe(nn.Linear(2, 2))) == 0
    assert "(model)" in str(sc.describe(nn.Conv2d(16, 16, 1)))
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module, got list"):
        sc.describe([model])


def test_describe_knows_no_gamma_before_anything_was_observed():
    model = sc.convert(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    row = sc.describe(model)[1]
    assert (row.source, row.smallest_gamma) == ("observed", None)
    model(image())
    assert sc.describe(model)[1].smallest_gamma == model[2].smallest_gamma()
    model[2].mean_source = None
    row = sc.describe(model)[1]
    assert (row.source, row.smallest_gamma) == ("none: set `mean_source`", None)


def with_a_spare(run):
    return Net(run, stem=nn.Conv2d(3, 8, 1), used=nn.Conv2d(8, 8, 1), spare=nn.Conv2d(8, 8, 1))


def test_a_conv_that_the_forward_never_reaches_is_skipped():
    # Its mean would never be observed, and every allocation would fail for the sake of it.
    model = sc.convert(with_a_spare(lambda n, x: n.used(n.stem(x))))
    assert reason(model, "spare") == "not reached by the model's forward"
    assert reason(model, "used") is None


def test_a_model_that_cannot_be_traced_says_so_in_the_log(caplog):
    model = with_a_spare(lambda n, x: n.used(n.stem(x)) if x.sum() > 0 else x)
    with caplog.at_level("INFO", logger="selectconv"):
        sc.convert(model)
    assert "cannot be traced" in caplog.text
    assert isinstance(model.used.mean_source, sc.ObservedMean)


class Optional(nn.Module):
    """A forward that decides by arguments that are not tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.head, self.wide = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 64, 1)

    def forward(self, x, mask=None, wide=False):
        x = self.stem(x)
        x = torch.relu(self.norm(x)) if mask is None else torch.relu(self.other(x) * mask)
        return self.wide(x) if wide else self.head(x)


def test_arguments_that_a_forward_decides_by_are_those_of_the_example():
    x = torch.randn(2, 3, 8, 8)
    for example in (x, None):
        model = sc.convert(Optional(), example)
        assert model.head.mean_source.bn is model.norm
    masked = sc.convert(Optional(), {"x": x, "mask": torch.rand(2, 16, 6, 6)})
    assert isinstance(masked.head.mean_source, sc.ObservedMean)
    # The example does not reach the other.
    assert selective(sc.convert(Optional(), {"x": x, "wide": True})) == {"wide"}


def test_an_unbatched_series_is_no_point():
    model = nn.Sequential(nn.Conv1d(3, 16, 3), nn.ReLU(), nn.Conv1d(16, 8, 3))
    sc.convert(model, torch.randn(3, 20))
    assert isinstance(model[2], sc.SelectConv1d)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
@pytest.mark.parametrize("example", [None, torch.randn(2, 3, 8, 8)], ids=["alone", "example"])
def test_a_forward_that_decides_by_chance_is_observed(draw, example):
    """Stochastic depth: what a trace reaches, and where E[X] comes from, must not be chance."""

    def run(net, x):
        x = net.norm(net.first(x)).relu()
        return net.last(net.second(x).relu() if draw() > 0.5 else x)

    for seed in range(6):
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        convs = {"first": nn.Conv2d(3, 8, 1), "second": nn.Conv2d(8, 8, 1)}
        model = Net(run, **convs, norm=nn.BatchNorm2d(8), last=nn.Conv2d(8, 4, 1))
        sc.convert(model, example)
        assert selective(model) == {"second", "last"}
        assert isinstance(model.last.mean_source, sc.ObservedMean)


# What changes after `convert`


def silu(model):
    model.relu = nn.SiLU()


def pooled(model):
    model.relu = nn.Sequential(model.relu, nn.MaxPool2d(2))


def frozen_statistics(model):
    model.norm.eval()


def by_hand(model):
    model.relu, model.eligible.mean_source = nn.SiLU(), sc.BatchNormMean(model.norm, F.relu)


def synchronised(model):
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (silu, "batch norm + SiLU"),
        (pooled, "observed"),
        (frozen_statistics, "observed"),
        (by_hand, None),
        (synchronised, None),
    ],
)
@pytest.mark.parametrize("is_part", [False, True])
def test_a_closed_form_that_no_longer_holds_is_told(change, now, is_part):
    part = chain(nn.Conv2d(16, 8, 1))
    sc.convert(part, image(), where=lambda name, conv: name == "eligible")
    model = nn.ModuleList([part]) if is_part else part  # a detector's backbone
    change(part)
    (source,) = (row.source for row in sc.describe(model) if row.name.endswith("eligible"))
    assert source.partition(" (now: ")[2].rstrip(")") == (now or "")
    allocator = sc.ChannelAllocator(model, total_epochs=9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        allocator.step(0)
        allocator.step(1)
    stale = [str(one.message) for one in told if "sc.convert" in str(one.message)]
    assert [now in words for words in stale] == [True] * (now is not None)


def test_a_batch_norm_that_stays_in_evaluation_mode_gives_no_closed_form():
    model = chain(nn.Conv2d(16, 8, 1))
    model.norm.eval()
    assert type(sc.convert(model).eligible.mean_source) is sc.ObservedMean
    model = sc.convert(chain(nn.Conv2d(16, 8, 1)).eval())  # but a model that evaluates as a whole
    assert type(model.eligible.mean_source) is sc.BatchNormMean
