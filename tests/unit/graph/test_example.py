"""Examples as arguments, and evaluation mode for a while."""

import numpy as np
import pytest
import torch
from torch import nn

from selectconv.graph.example import as_arguments, evaluating

X = torch.zeros(1)


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        (X, ((X,), {})),
        ((X, 2), ((X, 2), {})),
        ([X], ((X,), {})),
        ({"x": X}, ((), {"x": X})),
    ],
)
def test_arguments(example, arguments):
    assert as_arguments(example) == arguments


class Own:
    """What a model may take besides tensors."""


OWN = Own()


def test_objects_of_a_models_own_are_arguments():
    assert as_arguments(OWN) == ((OWN,), {})
    assert as_arguments((None, OWN)) == ((None, OWN), {})


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, "got None"),
        (3, "got 3"),
        ("x", "got 'x'"),
        ((), r"got \(\)"),
        ({"x": 3}, "got {'x': 3}"),
        ((1, 3, 16, 16), r"got \(1, 3, 16, 16\); .* a shape torch.zeros"),
        ((np.zeros((1, 3)),), r"got \(array.*; for an array .*torch.from_numpy"),
    ],
)
def test_what_is_no_example(example, message):
    with pytest.raises(TypeError, match=rf"`example_input`.*{message}"):
        as_arguments(example)


def test_flags_come_back_also_after_an_error():
    class Stubborn(nn.Dropout):
        def train(self, mode=True):
            return self  # as models do that hold their batch norms fixed

    model = nn.Sequential(Stubborn(), nn.ReLU().eval())

    def fail():
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
