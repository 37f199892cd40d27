"""Network slimming's own part: the search for how much to cut, floors, shapes of a cut network."""

import copy

import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.network import build_model, fit_shapes
from selectconv.lab.train.slimming import (
    MOST_OF_A_LAYER,
    Slimmer,
    count_filters,
    fixed_layers,
    num_kept,
)

pytest.importorskip("torch_pruning", reason="needs selectconv[pruning]")

SHAPE = (3, 16, 16)
NETS = {
    "densenet40": {"growth_rate": 8, "units": (2, 2, 2)},
    "resnet164": {"width": 8, "blocks": (1, 1, 1)},
    "resnext29": {"width": 8, "blocks": (1, 1, 1), "cardinality": 2},
    "condensenet182": {"growth_rates": (8, 8, 8), "units": (1, 1, 1)},
}


def slim(name, **given):
    """A network whose batch norms have learned scales of their own, and its slimmer."""
    given = {"model": name, "model_options": NETS[name], "bn_sparsity": 0.1, **given}
    common = {"data": "cifar10", "image_size": 16, "method": "slimming", "epochs": 4}
    config, info = resolve({**common, **given}), dataset_info("cifar10", 16)
    model = build_model(config, info)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
            nn.init.normal_(module.bias, 0.0, 0.1)
    return model, Slimmer(config, info, model)


@pytest.mark.filterwarnings("ignore:.*slimming reached:UserWarning")
@pytest.mark.parametrize("name", NETS)
def test_every_family_of_the_zoo_is_cut_to_its_target(name):
    model, slimmer = slim(name, target_macs=0.6)
    dense = copy.deepcopy(model)
    assert not slimmer.step(0)
    assert not slimmer.is_pruned
    report = slimmer.step(1)
    assert report.deallocated
    assert slimmer.is_pruned
    # A channel of these narrow networks is up to three hundredths of them.
    assert count_macs(model, SHAPE) / count_macs(dense, SHAPE) == pytest.approx(0.6, abs=0.03)
    num_cut = count_filters(dense) - count_filters(model)
    assert sum(map(len, report.deallocated.values())) == slimmer.num_cut() == num_cut
    whole = {n: m.out_channels for n, m in dense.named_modules() if isinstance(m, nn.Conv2d)}
    for conv_name, filters in report.deallocated.items():
        assert model.get_submodule(conv_name).out_channels == whole[conv_name] - len(filters)
        assert len(filters) <= MOST_OF_A_LAYER * whole[conv_name]
    model(torch.randn(2, *SHAPE)).sum().backward()
    assert not slimmer.step(2), "it cuts once"


def test_the_channels_of_the_smallest_scales_go():
    model, slimmer = slim("densenet40", target_macs=0.8)
    model.blocks[0][0].spatial.norm.weight.detach()[::2] *= 1e-3
    report = slimmer.step(1)
    assert set(report.deallocated["blocks.0.0.pointwise.conv"]) >= set(range(0, 32, 2))


def test_a_target_of_parameters():
    model, slimmer = slim("densenet40", target_params=0.4)
    dense = count_params(model)
    slimmer.step(1)
    assert count_params(model) / dense == pytest.approx(0.4, abs=0.01)


def test_the_penalty_pushes_scales_to_zero_until_they_are_cut():
    model, slimmer = slim("densenet40", bn_sparsity=0.25, target_macs=0.6)
    scales = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for scale in scales:
        scale.grad = torch.zeros_like(scale)
    slimmer.regularize()
    for scale in scales:
        assert torch.equal(scale.grad, 0.25 * scale.detach().sign())
    slimmer.step(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    slimmer.regularize()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_layers_keep_some_channels():
    assert [num_kept(n) for n in (1, 8, 10, 11, 40)] == [1, 1, 1, 2, 4]
    _, slimmer = slim("densenet40")
    group = [(type("Dep", (), {"target": type("Node", (), {"module": None})})(), [])]
    slimmer.importance = lambda group: torch.tensor([0.3, 0.1, 0.9, 0.2, 0.1, 0.8])
    assert (slimmer._score(group) > 100).tolist() == [False, False, True, False, False, False]


def test_what_is_never_cut():
    model = sc.create_model("resnet164", **NETS["resnet164"])
    names = {id(module): name for name, module in model.named_modules()}
    fixed = sorted(names[id(module)] for module in fixed_layers(model))
    assert fixed == [
        "blocks.0.0.expand.conv", "blocks.1.0.expand.conv", "blocks.2.0.expand.conv",
        "classifier", "stem",
    ]  # fmt: skip


def test_a_cut_network_is_rebuilt_from_its_weights_and_a_target_between_two_widths_warns():
    model, slimmer = slim("condensenet182", target_macs=0.6)
    # Its grouped convs lose four channels at a time.
    with pytest.warns(sc.SelectConvWarning, match=r"slimming reached 0\.\d+ .* closest to 0\.600"):
        slimmer.step(1)
    weights = model.state_dict()
    again = sc.create_model("condensenet182", **NETS["condensenet182"])
    fit_shapes(again, weights)
    again.load_state_dict(weights)
    x = torch.randn(2, *SHAPE)
    assert torch.equal(again.eval()(x), model.eval()(x))
    for left, right in zip(again.modules(), model.modules(), strict=True):
        assert repr(left) == repr(right)
