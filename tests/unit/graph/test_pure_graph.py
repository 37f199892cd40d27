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


# Models whose forward depends on shapes are traced for the example's; values are refused.


OTHER_BATCH = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def pools_large_maps(net, x):
    x = net.conv(x)
    if x.shape[-1] > 4:
        x = F.avg_pool2d(x, 2)
    return net.conv(x)


def pools_until_small(net, x):
    while x.size()[-1] > 2:
        x = F.max_pool2d(net.conv(x), 2, ceil_mode=True)
    return x


def walks_over_rows(net, x):
    x = net.conv(x)
    return torch.stack([x[:, :, row] for row in range(x.size(2))], 2).view(x.shape[0], -1)


def asks_for_everything_but_values(net, x):
    b, c, h, w = x.shape
    assert h == w
    if x.ndim == 4 and x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous():
        x = net.conv(x).reshape(b * c, h, w).reshape(b, c, h, w)
    return x + torch.arange(w, device=x.device)


def goes_through_parts(net, x):
    parts = torch.split(net.conv(x), 2, dim=1)
    total = sum(part.sum((1, 2, 3)) for part in parts)
    return total * len(parts) if len(x.shape) == 4 else total


def reads_its_weight(net, x):
    if net.conv.weight.shape[0] == x.shape[1]:
        return F.conv2d(x, net.conv.weight, net.conv.bias)
    return x


def writes_in_place(net, x):
    x = net.conv(x)
    if x.shape[2] == 6:
        x += 1
        x.relu_()
    return x


def net_of(run):
    return Net(run, conv=nn.Conv2d(4, 4, 1)).eval()


FREE = [
    pools_large_maps, pools_until_small, walks_over_rows, asks_for_everything_but_values,
    goes_through_parts, reads_its_weight, writes_in_place,
]  # fmt: skip


@pytest.mark.parametrize("run", FREE, ids=lambda run: run.__name__)
def test_shapes_are_those_of_the_example_and_batches_are_free(run):
    net = net_of(run)
    with pytest.warns(sc.SelectConvWarning, match="depends on shapes, in `") as caught:
        small = sc.compress(net, X)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the caller's line, not one of the package
    assert "batch" not in str(caught[0].message)
    for x in (X, OTHER_BATCH):
        torch.testing.assert_close(small(x), net(x))


def test_the_warning_names_module_and_condition():
    model = nn.Sequential(nn.ReLU(), net_of(pools_large_maps))
    with pytest.warns(sc.SelectConvWarning) as caught:
        sc.count(model, X)
    (warning,) = caught
    line = pools_large_maps.__code__.co_firstlineno + 2
    assert str(warning.message) == (
        f"`1` (Net) depends on shapes, in `if x.shape[-1] > 4:` (test_pure_graph.py, line "
        f"{line}): the model was traced for inputs of the example's shapes, and the result is "
        "only valid for these."
    )


@pytest.mark.filterwarnings("ignore:.*depends on shapes")
def test_counts_what_the_example_takes():
    net = net_of(pools_large_maps)
    assert sc.count(net, X).macs == 2 * 16 * (36 + 9)
    assert sc.count(net, X[:, :, :4, :4]).macs == 2 * 16 * (16 + 16)


def doubles_one(net, x):
    return net.conv(x) * (2 if x.shape[0] == 1 else 3)


def makes_zeros(net, x):
    return torch.zeros(x.shape[0], 4, 6, 6) + net.conv(x)


def counts_examples(net, x):
    return net.conv(x) / len(x)


@pytest.mark.parametrize("run", [doubles_one, makes_zeros, counts_examples])
def test_says_where_the_batch_is_fixed_too(run):
    net = net_of(run)
    with pytest.warns(sc.SelectConvWarning, match="shapes, including its batch size, and"):
        small = sc.compress(net, X)
    torch.testing.assert_close(small(X), net(X))


def if_mean(net, x):
    x = net.conv(x)
    return x if x.mean() > 0 else -x


def if_selected(net, x):
    found = x[x > 0]
    return net.conv(x) if found.shape[0] > 3 else x


def if_item(net, x):
    return net.conv(x) if x.max().item() > 0 else x


def if_number(net, x):
    return net.conv(x) * int(x.max())


def if_listed(net, x):
    return net.conv(x) if x.flatten().tolist()[0] > 0 else x


@pytest.mark.parametrize("run", [if_mean, if_selected, if_item, if_number, if_listed])
def test_values_are_refused_in_one_line(run):
    with pytest.raises(sc.CompressionError, match="depends on the values of a tensor") as error:
        sc.count(nn.Sequential(net_of(run)), X)
    text = str(error.value)
    assert text.startswith("`0` (Net) cannot be traced: ")
    assert "(test_pure_graph.py, line " in text
    assert "masked, still works" in text
    assert "\n" not in text


def test_arguments_that_are_not_tensors_are_part_of_the_example():
    class Options(nn.Module):
        def forward(self, x, double=True, *, mask=None):
            if double and mask is None:
                x = x * 2
            return x if mask is None else x * mask

    doubled = sc.compress(Options(), X)
    assert torch.equal(doubled(X), X * 2)
    with pytest.raises(TypeError, match="mask"):  # not traced for one: no silent other result
        doubled(X, mask=X)
    small = sc.compress(Options(), {"x": X, "double": False, "mask": X})
    assert torch.equal(small(X, False, X), X * X)


def test_other_failures_keep_their_reason():
    def run(net, x):
        return net.missing(x)

    with pytest.raises(sc.CompressionError, match=r"cannot be traced: AttributeError: .*missing"):
        sc.count(net_of(run), X)


def test_quotes_long_lines_in_part():
    def run(net, x):
        return net.conv(x) if x.mean() > 0 else "a text that makes this line too long for a message"

    with pytest.raises(sc.CompressionError, match=r"in `return .*\.\.\.` \(test_pure_graph"):
        sc.count(net_of(run), X)
