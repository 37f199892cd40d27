"""Traced graphs without writes and without what does nothing compute what the model computes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from selectconv.graph.dataflow import trace_dataflow
from tiny_models import Net

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def second_name(net, x):
    y = net.conv(x)
    z = y
    y += 1
    y *= 2
    return net.conv(z)


def numbers(net, x):
    height = width = x.shape[2]
    height //= 2
    height += 1
    return F.interpolate(net.conv(x), (height, width))


def written_module(net, x):
    y = net.conv(x)
    net.relu(y)
    return net.conv(y)


def written_function(net, x):
    y = net.conv(x)
    torch.relu_(y)
    F.elu(y, 2.0, True)
    y.add_(1).mul_(2)
    return y


def written_clone(net, x):
    y = net.conv(x)
    z = y.clone()
    z -= 1
    return y + z


RUNS = [second_name, numbers, written_module, written_function, written_clone]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_writes_become_values(run):
    net = Net(run, conv=nn.Conv2d(4, 4, 1), relu=nn.ReLU(inplace=True)).eval()
    want = net(X)
    flow = trace_dataflow(net, X)
    torch.testing.assert_close(flow.root(X), want)
    names = [str(getattr(node.target, "__name__", node.target)) for node in flow.operations]
    assert not any(name.endswith("_") or name in ("iadd", "imul", "ifloordiv") for name in names)
    assert net.relu.inplace  # the model's own
    torch.testing.assert_close(sc.compress(net, X)(X), want)


def flattened(net, x):
    y = net.conv(x)
    y.flatten(1).relu_()
    return net.conv(y)


def part(net, x):
    first, second = net.conv(x).chunk(2, 1)
    first += 1
    return torch.cat([first, second], 1)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (flattened, "output 0 of the compressed model"),  # a write into a view is not followed
        (lambda net, x: net.conv(x).fill_(0.0), "`fill_` writes in place in a way that is not"),
        (lambda net, x: operator.setitem(net.conv(x), (0, 0), 1.0), "`setitem` writes in place"),
    ],
)
def test_refuses_writes_that_cannot_be_followed(run, message):
    with pytest.raises(sc.CompressionError, match=message):
        sc.compress(Net(run, conv=nn.Conv2d(4, 4, 1)), X)


def test_one_of_several_views_may_be_written():
    net = Net(part, conv=nn.Conv2d(4, 4, 1))
    with torch.no_grad():  # autograd refuses such writes
        torch.testing.assert_close(sc.compress(net, X)(X), net(X))


def test_what_does_nothing_at_inference_is_gone():
    def run(net, x):
        torch._assert(x.dim() == 4, "a batch of images")
        x = net.alpha(net.drop(net.same(net.conv(x)))).detach()
        unused = net.conv(x)
        unused.relu_()
        return F.dropout(x, 0.5, net.training).clone()

    net = Net(
        run, conv=nn.Conv2d(4, 4, 1), drop=nn.Dropout2d(), alpha=nn.AlphaDropout(),
        same=nn.Identity(),
    )  # fmt: skip
    flow = trace_dataflow(net, X)
    assert [node.target for node in flow.operations] == ["x", "conv", "output"]
    assert [op.macs for op in flow.operations.values()] == [0, 2 * 36 * 16, 0]


@pytest.mark.parametrize(
    ("drop", "arguments"),
    [(F.dropout, {}), (torch.dropout, {"p": 0.5, "train": True})],  # torch's has another name
)
def test_dropout_that_is_always_on_stays(drop, arguments):
    net = Net(lambda net, x: drop(net.conv(x), **arguments), conv=nn.Conv2d(4, 4, 1))
    assert drop in [node.target for node in trace_dataflow(net, X).operations]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3, 4), nn.BatchNorm1d),
        ((3, 4, 5), nn.BatchNorm1d),
        ((3, 4, 5, 5), nn.BatchNorm2d),
        ((3, 4, 2, 2, 2), nn.BatchNorm3d),
    ],
)
def test_functional_batch_norms_become_modules(shape, kind):
    def run(net, x):
        state = net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias
        return F.batch_norm(x, *state, net.norm.training, net.norm.momentum, net.norm.eps)

    norm = nn.BatchNorm1d(4, eps=0.1, momentum=0.3)
    norm.running_var += 2
    flow = trace_dataflow(Net(run, norm=norm), torch.randn(shape))
    (made,) = (op.module for op in flow.operations.values() if op.module is not None)
    assert type(made) is kind
    assert (made.eps, made.momentum) == (0.1, 0.3)
    x = torch.randn(shape)
    torch.testing.assert_close(flow.root(x), run(Net(run, norm=norm).eval(), x))


def test_a_functional_batch_norm_that_always_trains_stays():
    def run(net, x):
        state = net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias
        return F.batch_norm(net.conv(x), *state, True)

    net = Net(run, conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)).eval()
    flow = trace_dataflow(net, X)
    assert F.batch_norm in [node.target for node in flow.operations]
    torch.testing.assert_close(flow.root(X), net(X))  # by the batch's own moments
