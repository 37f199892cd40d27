"""Where channels end up, tried on a tensor of channel numbers."""

import pytest
import torch.nn.functional as F
from torch import nn

from selectconv.graph.input_mean import moved_channels
from selectconv.graph.tracer import Tracer
from tiny_models import Net


def moved(run, channels=6, axes=2):
    net = Net(run, shuffle=nn.ChannelShuffle(2), relu=nn.ReLU())
    nodes = list(Tracer(lambda module: False, {}).trace(net).nodes)
    found = moved_channels(nodes[0], nodes[-2], channels, axes, dict(net.named_modules()))
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("run", "channels"),
    [
        (lambda net, x: x.chunk(2, 1)[1], [3, 4, 5]),
        (lambda net, x: x[:, ::2], [0, 2, 4]),
        (lambda net, x: x.flip(1), [5, 4, 3, 2, 1, 0]),
        (lambda net, x: net.shuffle(x), [0, 3, 1, 4, 2, 5]),
        (lambda net, x: F.channel_shuffle(x, 3), [0, 2, 4, 1, 3, 5]),
        (lambda net, x: x.view(x.size(0), x.shape[1], x.size(2), -1), [0, 1, 2, 3, 4, 5]),
        (lambda net, x: x.unflatten(1, (2, x.shape[1] // 2))[:, 1], [3, 4, 5]),
        (lambda net, x: x.narrow(1, 4, 2).repeat(1, 2, 1, 1), [4, 5, 4, 5]),
        (lambda net, x: F.pixel_unshuffle(x[:, :2], 2), [0, 0, 0, 0, 1, 1, 1, 1]),
        (lambda net, x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), list(range(6))),
    ],
)
def test_channels_that_move(run, channels):
    assert moved(run) == channels


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: x.transpose(1, 2),
        lambda net, x: x.reshape(-1, 3, 4, 6),
        lambda net, x: x.flatten(1),
        lambda net, x: net.relu(x),
        lambda net, x: x[:, :0],
        lambda net, x: x.view(1, 2, 3),
        lambda net, x: x.chunk(2, 1),
    ],
)
def test_everything_else_is_not_known(run):
    assert moved(run) is None


def test_in_every_dimension():
    assert moved(lambda net, x: x[:, 1:3], axes=1) == [1, 2]
    assert moved(lambda net, x: x[:, 1:3], axes=3) == [1, 2]
