"""Which filters stay for a few readers, by hand."""

import torch
from torch import nn

import selectconv as sc
from selectconv.deploy.held_filters import HeldFilters, find_held
from selectconv.trace.dataflow import trace_dataflow
from tiny_models import Net

X = torch.zeros(2, 3, 6, 6)


def select(closed):
    layer = sc.SelectConv2d(4, 2, 1)
    layer.close(closed)
    return layer


def held(net):
    return find_held(trace_dataflow(net.eval(), X))


def three_readers(net, x):
    x = torch.relu(net.norm(net.first(x)))
    return net.a(x) + net.b(x) + net.c(x)


def net_of_three(a, b, c, run=three_readers):
    first = nn.Conv2d(3, 4, 1, bias=False)
    return Net(run, first=first, norm=nn.BatchNorm2d(4), a=select(a), b=select(b), c=select(c))


def test_one_of_three_readers_keeps_two_filters():
    # Filter 0: closed by a and b. Filter 1: by b and c. Filter 2: by a alone. Filter 3: by all.
    net = net_of_three([0, 2, 3], [0, 1, 3], [1, 3])
    macs = 2 * 36 * 3 * 2  # images, pixels, inputs, filters
    assert held(net) == [HeldFilters("first", 2, 3, ("c", "a"), macs)] or held(net) == [
        HeldFilters("first", 2, 3, ("a", "c"), macs)
    ]


def test_nothing_is_held_where_most_read_or_nobody_does():
    assert held(net_of_three([0], [1], [2])) == []
    assert held(net_of_three([0, 1], [0, 1], [0, 1])) == []


def test_through_a_residual_sum():
    def run(net, x):
        x = net.norm(net.first(x))
        x = x + net.second(x)
        return net.a(x) + net.b(x) + net.c(x)

    net = net_of_three([0], [0], [], run)
    net.add_module("second", nn.Conv2d(4, 4, 1, bias=False))
    rows = {row.name: row for row in held(net)}
    # `second` reads filter 0 of `first`, too: half of its readers, which is not a few.
    assert set(rows) == {"second"}
    assert (rows["second"].count, rows["second"].readers) == (1, ("c",))


def test_what_reads_everything_is_a_reader():
    def run(net, x):
        x = net.norm(net.first(x))
        return net.a(x), net.b(x), net.c(x), x

    rows = held(net_of_three([0], [0], [0], run))
    assert [(row.count, row.readers) for row in rows] == [(1, ("the output",))]


def test_describe_shows_them_with_an_example():
    net = net_of_three([0, 2, 3], [0, 1, 3], [1, 3])
    shown = sc.describe(net, X)
    assert [row.name for row in shown.held] == ["first"]
    for text in (str(shown), shown._repr_html_()):
        assert "most of the layers after them closed them" in text
        assert "2 of 3" in text
    assert "closed them" not in str(sc.describe(net))


def test_filters_that_stay_for_a_round_number_are_held_by_nobody():
    def run(net, x):
        return net.a(torch.relu(net.deep(net.first(x))))

    reader = sc.SelectConv2d(64, 2, 1)
    reader.close([0])
    deep = nn.Conv2d(64, 64, 3, groups=64, bias=False)
    net = Net(run, first=nn.Conv2d(3, 64, 1, bias=False), deep=deep, a=reader)
    kept = sc.compress(net.eval(), X).get_submodule("deep")
    assert kept.out_channels == 64  # a multiple of 8: filter 0 stays, and nobody reads it
    assert held(net) == []
