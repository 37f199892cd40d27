"""Networks from outside the zoo: names, wrong names, what is built."""

import sys

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.data.registry import dataset_info
from selectconv.train.config import resolve
from selectconv.train.network import build_model, build_plain
from selectconv.zoo.external import build_external, check_model_name

MODULE = """
from torch import nn

def small(num_classes, in_channels, width=16):
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes),
    )

def number(num_classes, in_channels):
    return 3

def picky(classes):
    return None

value = 7
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's in the current folder, which is not on Python's path."""
    (tmp_path / "own_networks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_networks"
    sys.modules.pop("own_networks", None)


def build(name, **options):
    return build_external(name, num_classes=5, in_channels=1, options=options)


def test_a_function_in_the_current_folder(own_module):
    model = build(f"{own_module}:small", width=24)
    assert model[0].weight.shape == (24, 1, 3, 3)
    assert model[-1].out_features == 5


def test_timm():
    model = build("timm:resnet10t").eval()
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("densenet4", "Did you mean 'densenet40'"),
        ("resnet", "Or timm:NAME, or package.module:function"),
        ("timm:", "timm:NAME"),
        (":f", "package.module:function; got ':f'"),
        ("a-b:c", "got 'a-b:c'"),
        ("a..b:c", "got 'a..b:c'"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=message):
        check_model_name(name)


def test_a_name_that_is_none():
    with pytest.raises(TypeError, match="got 3"):
        check_model_name(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("smal", "has no function 'smal'. Did you mean 'small'"),
        ("value", "has no function 'value'"),
        ("number", "must return an nn.Module, got int"),
        ("picky", "must accept `num_classes`, `in_channels`"),
    ],
)
def test_wrong_functions(own_module, function, message):
    with pytest.raises(ValueError, match=message):
        build(f"{own_module}:{function}")


def test_a_module_that_is_not_there():
    with pytest.raises(ValueError, match="cannot import 'no_such_module'"):
        build("no_such_module:f")


def test_an_option_that_the_function_lacks(own_module):
    with pytest.raises(ValueError, match=r"\['depth'\]"):
        build(f"{own_module}:small", depth=3)


def test_a_misspelt_timm_name():
    with pytest.raises(ValueError, match=r"no network 'resnt10t'\. Did you mean 'resnet10t'"):
        build("timm:resnt10t")


@pytest.mark.parametrize(
    ("method", "realloc", "has_shift"),
    [("select", None, (True, True)), ("select", "pointwise", (False, True)),
     ("dealloc", None, (False, False)), ("shift", None, (True, True))],
)  # fmt: skip
def test_a_runs_network_is_converted(own_module, method, realloc, has_shift):
    options = {} if realloc is None else {"realloc": realloc}
    config = resolve(
        {"model": f"{own_module}:small", "data": "digits", "method": method,
         "model_options": options}
    )  # fmt: skip
    info = dataset_info("digits")
    torch.manual_seed(0)
    model = build_model(config, info)
    layers = [m for m in model.modules() if isinstance(m, sc.SelectConv2d)]
    assert tuple(layer.shift is not None for layer in layers) == has_shift
    torch.manual_seed(0)
    plain = build_plain(config, info)
    assert not any(isinstance(m, sc.SelectConv2d) for m in plain.modules())
    assert type(plain) is nn.Sequential
    # The same start for every method.
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)


def test_run_names_are_file_names():
    assert resolve({"model": "timm:resnet18"}).run_name == "timm-resnet18-cifar10-select-0"
