"""Networks from outside the zoo: names, wrong names, what is built."""

import sys

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.network import build_model, build_plain, check_network
from selectconv.lab.zoo.external import build_external, check_model_name

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

def broken(num_classes, in_channels):
    raise RuntimeError("no weights here")

class Named(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return {"logits": self.head(x)}

class Aided(Named):
    def forward(self, x):
        return (self.head(x), self.head(x)) if self.training else self.head(x)

def named(num_classes, in_channels):
    return Named(num_classes)

def aided(num_classes, in_channels):
    return Aided(num_classes)

def fewer(num_classes, in_channels):
    return small(num_classes - 3, in_channels)

def spatial(num_classes, in_channels):
    return nn.Conv2d(in_channels, num_classes, 3)

def large(num_classes, in_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 8, 16), nn.Flatten(), nn.Linear(8, num_classes))

def converted(num_classes, in_channels):
    import selectconv as sc
    return sc.convert(small(num_classes, in_channels))

def lazy(num_classes, in_channels):
    return nn.Sequential(
        nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(16, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(num_classes),
    )

value = 7
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's in the current folder, which is not on Python's path."""
    (tmp_path / "own_networks.py").write_text(MODULE)
    (tmp_path / "wrong_networks.py").write_text("1 / 0")
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
        (3, "got 3"),
        ("densenet4", "Did you mean 'densenet40'"),
        ("resnet", "Or timm:NAME, or package.module:function"),
        ("timm:", "timm:NAME"),
        (":f", "package.module:function; got ':f'"),
        ("a-b:c", "got 'a-b:c'"),
        ("a..b:c", "got 'a..b:c'"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_model_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_networks:smal", "has no function 'smal'. Did you mean 'small'"),
        ("own_networks:value", "has no function 'value'"),
        ("own_networks:number", "must return an nn.Module, got int"),
        ("own_networks:picky", "must accept `num_classes`, `in_channels`"),
        ("own_networks:broken", "return an nn.Module; .*failed with RuntimeError: no weights"),
        ("wrong_networks:f", "cannot import 'wrong_networks' .*ZeroDivision"),
        ("no_such_module:f", "cannot import 'no_such_module' .*ModuleNotFound"),
        ("timm:resnt10t", r"no network 'resnt10t'\. Did you mean 'resnet10t'"),
    ],
)
def test_names_of_nothing_that_can_be_built(own_module, name, message):
    with pytest.raises(ValueError, match=message):
        build(name)


def test_an_option_that_the_function_lacks(own_module):
    with pytest.raises(ValueError, match=r"\['depth'\]"):
        build("own_networks:small", depth=3)


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


def settings(model, method="select"):
    return resolve({"model": model, "data": "digits", "method": method, "device": "cpu"})


@pytest.mark.parametrize("method", ["plain", "select"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_networks:named", r"must return a tensor \(N, 10\), .* for 2 images it returned dict"),
        ("own_networks:aided", "returned tuple"),
        ("own_networks:fewer", r"returned \(2, 7\)"),
        ("own_networks:spatial", r"returned \(2, 10, 6, 6\)"),
        ("own_networks:converted", "must return a plain network, .* leave out sc.convert"),
        ("timm:vit_tiny_patch16_224", "must take images"),
        (
            "own_networks:large",
            r"must take images of shape \(N, 1, 8, 8\) .* it fails with RuntimeError",
        ),
    ],
)
def test_networks_that_do_not_fit_are_named_with_what_is_wanted(name, message, method, own_module):
    with pytest.raises(ValueError, match=f"`model` '{name}' .*{message}"):
        check_network(settings(name, method), dataset_info("digits"))


def test_a_network_is_tried_without_touching_the_random_numbers(own_module):
    before = torch.get_rng_state()
    check_network(settings(f"{own_module}:small"), dataset_info("digits"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_get_their_parameters(own_module):
    config = settings(f"{own_module}:lazy")
    check_network(config, dataset_info("digits"))
    model = build_model(config, dataset_info("digits"))
    assert isinstance(model[3], sc.SelectConv2d)
    assert model[-1].weight.shape == (10, 16)
    assert int(model[1].num_batches_tracked) == 0
