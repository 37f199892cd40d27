"""Settings: the paper's defaults, what is refused, the cosine."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from selectconv.allocate.settings import MODES
from selectconv.core.layer import DAMAGES
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train import config as config_module
from selectconv.lab.train.config import (
    TrainConfig,
    describe_setting,
    resolve,
    setting_names,
    setting_types,
)
from selectconv.lab.train.estimate import describe_method
from selectconv.lab.train.loop import Display, evaluate
from selectconv.lab.train.methods import METHODS
from selectconv.lab.train.network import build_model


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"epochs": 300, "batch_size": 64, "gamma": 0.001, "top_k": 3, "max_copies": "none"}),
        ({"model": "densenet100"}, {"max_copies": 32, "stop_at": 0.5, "grace": 0}),
        ({"model": "resnet164"}, {"max_copies": "none"}),
        ({"model": "resnext29"}, {"epochs": 300}),
        ({"data": "fashion-mnist"}, {"epochs": 300, "batch_size": 128}),
        ({"data": "tiny-imagenet"}, {"epochs": 200, "batch_size": 128}),
        ({"data": "imagenet", "model": "densenet121"}, {"epochs": 120, "gamma": 0.0005}),
        ({"data": "imagenet", "model": "resnet50"}, {"batch_size": 128, "gamma": 0.001}),
        ({"model": "condensenet182"}, {"epochs": 600, "batch_size": 64}),
        ({"model": "condensenet182", "epochs": 3}, {"epochs": 3}),
        ({"method": "slimming"}, {"target_macs": 0.5, "target_params": None}),
        ({"method": "slimming", "target_macs": 0.3}, {"target_macs": 0.3}),
        (
            {"method": "slimming", "target_params": 0.3},
            {"target_macs": None, "target_params": 0.3},
        ),
        ({"method": "dealloc"}, {"target_macs": None, "gamma": 0.001, "stop_at": 0.5, "lr": 0.1}),
        ({}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "shift_weight_decay": 1e-5}),
    ],
)
def test_defaults_are_the_papers(given, expected):
    config = resolve(given).to_dict()
    assert {name: config[name] for name in expected} == expected


def test_settings_come_back_from_their_dict():
    for cap in (5, "none"):
        config = resolve({"model": "densenet100", "data": "digits", "seed": 7, "max_copies": cap})
        assert resolve(config.to_dict()) == config
        assert config.max_copies == (None if cap == "none" else cap)
    assert list(config.to_dict()) == setting_names()


def test_cosine_from_lr_to_zero():
    config = resolve({"lr": 0.2})
    assert config.lr_at(0, 100) == 0.2
    assert config.lr_at(50, 100) == pytest.approx(0.1)
    assert 0 < config.lr_at(99, 100) < 1e-4


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"epoch": 3}, ValueError, "'epochs'"),
        ({"model": "resnet"}, ValueError, "`model` must be one of"),
        ({"data": "cifar"}, ValueError, "'cifar10'"),
        ({"method": "prune"}, ValueError, "`method` must be one of"),
        ({"method": ["select"]}, ValueError, r"got \['select'\]"),
        ({"method": "lgc"}, ValueError, "needs `model` condensenet182, got 'densenet40'"),
        ({"method": "slimming", "precision": "16-mixed"}, ValueError, "got '16-mixed'"),
        ({"method": "slimming", "stop_at": 0.0}, ValueError, "`stop_at` must be above 0"),
        ({"target_macs": 0.0}, ValueError, "`target_macs` .* got 0.0"),
        ({"target_params": 2}, ValueError, "`target_params` .* got 2"),
        ({"target_macs": "half"}, TypeError, "'half'"),
        ({"target_macs": 0.5, "target_params": 0.5}, ValueError, "cannot be combined"),
        (
            {"target_macs": 0.5, "method": "plain"},
            ValueError,
            "needs one of the methods .* got 'plain'",
        ),
        ({"group_lasso": -1.0}, ValueError, "`group_lasso` must be a finite"),
        ({"epochs": 0}, ValueError, "at least 1, got 0"),
        ({"epochs": 2.5}, TypeError, "`epochs` must be an integer .* got 2.5"),
        ({"gamma": float("nan")}, ValueError, "got nan"),
        ({"lr": -1.0}, ValueError, "got -1.0"),
        ({"momentum": "much"}, TypeError, "'much'"),
        ({"max_copies": 0}, ValueError, "at least 1, got 0"),
        ({"subset": 60_000}, ValueError, "at most 50,000"),
        ({"test_subset": 10_001}, ValueError, "at most 10,000"),
        ({"compile": "yes"}, TypeError, "`compile` .* got 'yes'"),
        ({"device": "tpu"}, ValueError, "got 'tpu'"),
        ({"precision": "bf16"}, ValueError, "bf16-mixed"),
        ({"data_root": 3}, TypeError, "`data_root` .* got int"),
        ({"model_options": 3}, TypeError, "`model_options` must be a mapping .* got 3"),
        ({"epochs": None}, TypeError, "got None"),
        ({"seed": -1}, ValueError, "at least 0, got -1"),
        ({"damage": "max"}, ValueError, "got 'max'"),
        ({"shifts": "half"}, ValueError, "`shifts`.*learned, whole.*'half'"),
        ({"shifts": "whole", "method": "zero"}, ValueError, "`shifts` whole.*`method`.*'zero'"),
    ],
)
def test_wrong_settings_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        resolve(given)


def test_a_settings_help_follows_from_its_declaration():
    said = {name: describe_setting(name) for name in setting_names()}
    assert said["seed"] == "seed of all random numbers (default: 0)"
    assert said["epochs"].endswith(
        "(default: the paper's value for the model and data, otherwise 300)"
    )
    assert said["lr"].endswith("(default: 0.1)")  # from the recipes
    assert said["channels_last"].endswith("(default: true)")
    assert "default" not in said["target_macs"]


def test_every_setting_is_declared_once_and_the_recipes_hold_the_papers_alone():
    groups = ("task", "training", "tuning", "selection", "aside")
    declared = [name for group in groups for name in setting_names(group)]
    assert sorted(declared) == sorted(setting_names())
    assert set(setting_types().values()) == {str, dict, int, float, bool, float | str}
    assert (setting_types()["max_copies"], setting_types()["model_options"]) == (int, dict)
    without = {
        field.name
        for field in dataclasses.fields(TrainConfig)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    assert without == set(config_module._recipes()["common"])
    assert config_module.DAMAGES == DAMAGES


@pytest.mark.parametrize(
    ("model", "epochs", "parameters"),
    [("densenet_bc190", 300, 25_624_430), ("condensenet182", 600, 13_792_906)],
)
def test_the_papers_compression_experiments(model, epochs, parameters):
    config = resolve({"model": model, "method": "dealloc"})
    assert (config.data, config.epochs, config.batch_size) == ("cifar10", epochs, 64)
    with torch.device("meta"):
        built = build_model(config, dataset_info("cifar10"))
    assert sum(p.numel() for p in built.parameters()) == parameters
    assert all(name.rpartition(".")[2] != "shift" for name, _ in built.named_parameters())


# The table of methods: complete, consistent, and each row carried out by a class.


SMALL = {"growth_rate": 4, "units": [1, 1]}


def test_the_methods_of_the_command():
    names = ["plain", "select", "zero", "random", "dealloc", "shift", "lgc", "slimming"]
    assert list(METHODS) == names
    assert [name for name in names if METHODS[name].is_selective] == names[1:6]
    assert set(names[1:6]) == set(MODES) - {"none"}
    assert all(METHODS[name].name == name for name in names)


def test_rows_are_told_apart_and_use_settings_that_exist():
    for attribute in ("paper_name", "words", "colour", "rank"):
        assert len({getattr(method, attribute) for method in METHODS.values()}) == len(METHODS)
    assert sorted(method.rank for method in METHODS.values()) == list(range(len(METHODS)))
    known = {*setting_names(), "realloc"}
    assert all(set(method.uses) <= known for method in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_built_from_a_runs_settings(name):
    given = {"data": "digits", "method": name, "epochs": 2, "model_options": SMALL}
    if METHODS[name].needs_model:
        options = {"growth_rates": [4, 4, 4], "units": [1, 1, 1]}
        given |= {"model": METHODS[name].needs_model, "model_options": options}
    config, info = resolve(given), dataset_info("digits")
    model = build_model(config, info)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    method = METHODS[name].build(config, info, model, optimizer)
    assert method.counts(model) == {"moved": 0, "closed": 0}
    assert (method.state_dict() is not None) == config.method_info.is_selective
    assert describe_method(config).startswith(f"{name}: ")
    assert "{" not in describe_method(config)


def test_error_and_loss_are_means_over_images():
    logits, labels = 9.0 * torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 1, 1, 2])
    batches = list(zip(logits.split(3), labels.split(3), strict=True))
    loader = SimpleNamespace(epoch=lambda epoch: batches)
    found = evaluate(
        nn.Identity(), [loader], SimpleNamespace(world_size=1, device="cpu"), Display()
    )
    loss = nn.functional.cross_entropy(logits, labels).item()
    assert found == {"images": 4, "error": 25.0, "loss": pytest.approx(loss)}
