"""Random small CNNs: converted, they compute the same and can be trained; compressed, too."""

import copy
import random

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

import selectconv as sc
from scrambled import assert_compresses_the_same, scramble
from soak.networks import outputs
from soak.random_network import Builder, sum_of_squares
from tiny_models import select_layers


def draw_network(seed):
    """Draw a network and a batch for it; its batch norms are not all alike, as in trained ones."""
    torch.manual_seed(seed)
    builder = Builder(random.Random(seed))
    model, x = builder.network()
    convs = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    assume(any(conv.in_channels >= 8 and conv.groups < conv.in_channels for conv in convs))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.normal_(module.weight, 1.0, 0.5)
            nn.init.normal_(module.bias, 0.0, 0.5)
    return model, x


@pytest.mark.timeout(300)  # 23 s of CPU; a busy machine takes several times as long
@settings(max_examples=max(100, settings.default.max_examples))
@given(
    seed=st.integers(0, 2**31),
    has_example=st.booleans(),
    realloc=st.sampled_from(["all", "pointwise", "none"]),
)
def test_convert_then_train(seed, has_example, realloc):
    model, x = draw_network(seed)
    plain = copy.deepcopy(model)
    sc.convert(model, x if has_example else None, realloc=realloc)
    assert_same_outputs(model.eval(), plain.eval(), x)
    model.train(), plain.train()
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(2):
        assert_same_outputs(model, plain, x)
    train_a_step(model, optimizer, x)
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=10, gamma=0.2)
    report = allocator.step(0)
    event(f"slots changed: {bool(report)}")
    assert all(layer.gate.any() for layer in select_layers(model).values())
    assert sum(row.moved for row in sc.describe(model)) == sum(
        map(len, report.reallocated.values())
    )
    train_a_step(model, optimizer, x)
    assert all(y.isfinite().all() for y in outputs(model.eval(), x))


def assert_same_outputs(model, plain, x):
    got = []
    for net in (model, plain):
        torch.manual_seed(0)  # of dropout
        got.append(outputs(net, x))
    assert all(torch.equal(*pair) for pair in zip(*got, strict=True))


def train_a_step(model, optimizer, x):
    optimizer.zero_grad()
    sum_of_squares(model(x)).backward()
    missing = [name for name, value in model.named_parameters() if value.grad is None]
    assert missing == []
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*depends on shapes:selectconv.SelectConvWarning")
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    closed=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    moved=st.sampled_from([0.0, 0.3]),
    round_to=st.sampled_from([None, None, 4]),
)
def test_compress_keeps_the_outputs(seed, closed, moved, round_to):
    model, x = draw_network(seed)
    model, x = model.double(), x.double()  # some networks magnify rounding
    scramble(sc.convert(model, x), seed=seed, closed=closed, moved=moved)
    assert_compresses_the_same(model, x, **({} if round_to is None else {"round_to": round_to}))
