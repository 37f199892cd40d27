"""The paper's networks: sizes of PAPER_FACTS.md sections 1 and 2, stems, initialisation, errors."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import selectconv as sc
from selectconv.core.layer import SelectConvNd

# An estimated standard deviation of n normal values is off by 1 / sqrt(2 n); five times that.
STD_ERRORS = 5

CIFAR10, CIFAR100, FASHION, TINY = (
    {}, {"num_classes": 100}, {"in_channels": 1}, {"num_classes": 200, "stem": "tiny"},
)  # fmt: skip
PARAMETERS = [
    ("densenet40", CIFAR10, 211_978, 216_514),
    ("densenet40", CIFAR100, 233_668, 238_204),
    ("densenet40", FASHION, 211_546, 216_082),
    ("densenet40", TINY, 257_768, 262_304),
    ("densenet_bc190", {"realloc": "none"}, 25_624_430, 25_624_430),
]
# Without dropout and with few weights, for what needs a forward.
MINI = {"growth_rate": 4, "units": (2, 1, 1)}


def build(name, **options):
    """Build a model without memory or random numbers."""
    with torch.device("meta"):
        return sc.create_model(name, **options)


def count(modules):
    return sum(value.numel() for module in modules for value in module.parameters(recurse=False))


def convs_of(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize(("name", "options", "plain", "selective"), PARAMETERS)
def test_parameters(name, options, plain, selective):
    assert count(build(name, **options).modules()) == plain
    assert count(build(name, **options, selective=True).modules()) == selective


@pytest.mark.parametrize(
    ("name", "conv", "norm", "linear"),
    [
        ("densenet40", 202_824, 6_744, 2_410),
        ("densenet_bc190", 25_345_560, 256_960, 21_910),
    ],
)
def test_parameters_by_kind(name, conv, norm, linear):
    modules = list(build(name).modules())
    assert count(m for m in modules if isinstance(m, nn.Conv2d)) == conv
    assert count(m for m in modules if isinstance(m, nn.BatchNorm2d)) == norm
    assert count(m for m in modules if isinstance(m, nn.Linear)) == linear


@pytest.mark.parametrize(
    ("name", "realloc", "expected"),
    [
        # convs, selective, of which re-allocating, de-allocating only
        ("densenet40", "pointwise", (37, 36, 18, 18)),
        ("densenet40", "all", (37, 36, 36, 0)),
        ("densenet40", "none", (37, 36, 0, 36)),
        ("densenet_bc190", "none", (189, 188, 0, 188)),
    ],
)
def test_numbers_of_convs(name, realloc, expected):
    convs = convs_of(build(name, selective=True, realloc=realloc))
    layers = [conv for conv in convs if isinstance(conv, SelectConvNd)]
    moving = [layer for layer in layers if layer.shift is not None]
    assert (len(convs), len(layers), len(moving), len(layers) - len(moving)) == expected
    assert type(convs[0]) is nn.Conv2d
    if realloc == "pointwise":
        assert {layer.kernel_size for layer in moving} == {(1, 1)}


def test_shift_biases():
    model = build("densenet40", selective=True)
    shifts = [value for name, value in model.named_parameters() if name.endswith(".shift")]
    assert sum(shift.numel() for shift in shifts) == 4_536


@pytest.mark.parametrize(
    ("name", "options", "size", "macs", "width"),
    [
        ("densenet40", {}, 32, 71_331_840 + 2_400, 240),
        ("densenet40", {"stem": "tiny"}, 64, 71_331_840 + 2_400, 240),
        ("densenet_bc190", {}, 32, 9_301_923_840 + 21_900, 2190),
    ],
)
def test_multiply_adds_and_final_width(name, options, size, macs, width):
    model = build(name, **options)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, 3, size, size, device="meta"))
    assert counter.get_total_flops() == 2 * macs
    assert model.classifier.in_features == width


@pytest.mark.parametrize(
    ("stem", "size", "map_size"),
    [(None, 32, 32), ("cifar", 32, 32), ("tiny", 64, 32), ("imagenet", 224, 56)],
)
def test_stems(stem, size, map_size):
    model = build("densenet40", stem=stem)
    maps = model.stem(torch.zeros(1, 3, size, size, device="meta"))
    assert maps.shape == (1, 24, map_size, map_size)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_image_sizes(selective, channels, size):
    model = sc.create_model(
        "densenet40", in_channels=channels, num_classes=7, selective=selective, **MINI
    )
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["densenet40", "densenet_bc190"])
@pytest.mark.parametrize("realloc", ["pointwise", "all", "none"])
def test_selective_model_computes_what_the_plain_one_does(name, realloc):
    plain = sc.create_model(name, **MINI)
    model = sc.create_model(name, selective=True, realloc=realloc, **MINI)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert {key.rpartition(".")[2] for key in missing} <= {
        "gate", "index", "moved", "shifted", "shift",
    }  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("how", ["built selective", "converted"])
def test_every_selective_conv_reads_the_norm_before_it(how):
    model = sc.create_model("densenet_bc190", selective=how == "built selective", **MINI)
    if how == "converted":
        sc.convert(model, torch.zeros(1, 3, 8, 8), min_channels=1)
    blocks = [module for module in model.modules() if hasattr(module, "norm")]
    assert len(blocks) == len(convs_of(model)) - 1
    for block in blocks:
        assert block.conv.mean_source.bn is block.norm
        assert block.conv.mean_source.is_nonnegative


def test_same_seed_gives_the_same_weights_plain_or_selective():
    states = []
    for selective in (False, True):
        torch.manual_seed(5)
        states.append(sc.create_model("densenet40", selective=selective, **MINI).state_dict())
    plain, model = states
    assert all(torch.equal(value, model[name]) for name, value in plain.items())


@pytest.mark.parametrize("selective", [False, True])
def test_initialisation(selective):
    model = sc.create_model("densenet40", selective=selective)
    for conv in convs_of(model):
        std = math.sqrt(2 / (math.prod(conv.kernel_size) * conv.out_channels))
        error = STD_ERRORS / math.sqrt(2 * conv.weight.numel())
        assert conv.weight.std().item() == pytest.approx(std, rel=error)
        assert conv.bias is None
        if isinstance(conv, SelectConvNd):
            assert conv.weight_std == std
            assert conv.shift is None or not conv.shift.any()
    assert not model.classifier.bias.any()


def test_list_models():
    names = sc.list_models()
    assert names == sorted(names)
    assert {"densenet40", "densenet_bc190"} <= set(names)
    for name in names:
        assert count(build(name).modules()) > 0


@pytest.mark.parametrize(
    ("name", "options", "error", "match"),
    [
        ("densnet40", {}, ValueError, "got 'densnet40'. Did you mean 'densenet40'?"),
        ("vit", {}, ValueError, "`name` must be one of .*densenet40, .*; got 'vit'"),
        ("densenet40", {"depth": 5}, TypeError, "`densenet40` has no argument 'depth'; .*units"),
        ("densenet40", {"stem": "mnist"}, ValueError, "`stem` must be one of .*; got 'mnist'"),
        ("densenet40", {"realloc": "point"}, ValueError, "`realloc`.*'point'.*'pointwise'"),
        ("densenet40", {"num_classes": 0}, ValueError, "`num_classes` must be at least 1, got 0"),
        ("densenet40", {"num_classes": 2.0}, TypeError, "`num_classes` must be an integer"),
        ("densenet40", {"in_channels": 0}, ValueError, "`in_channels` must be at least 1, got 0"),
    ],
)
def test_refused(name, options, error, match):
    with pytest.raises(error, match=match):
        build(name, **options)
