"""The table of methods: complete, consistent, and each row carried out by a class."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from selectconv.allocate.settings import MODES
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve, setting_names
from selectconv.lab.train.estimate import describe_method
from selectconv.lab.train.loop import Display, evaluate
from selectconv.lab.train.methods import METHODS
from selectconv.lab.train.network import build_model

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
