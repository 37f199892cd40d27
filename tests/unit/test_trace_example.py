"""Examples as arguments, and evaluation mode for a while."""

import pytest
import torch
from torch import nn

from selectconv.trace.example import as_arguments, evaluating

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
