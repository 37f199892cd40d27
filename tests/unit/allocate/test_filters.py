"""Closing whole filters: which go together, in which order, and that they stay closed."""

import contextlib
import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from tiny_models import Net

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def conv(inputs, outputs, size=3, **options):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def allocator(net, optimizer=None, **options):
    options = {"total_epochs": 4, "stop_at": 1.0, "gamma": 0.3} | options
    return sc.ChannelAllocator(
        net, optimizer, mode="dealloc", granularity="filter", example_input=X[:1], **options
    )


def drawn(net, seed=0):
    """Convert a network, and give it weights and statistics that differ between channels."""
    generator = torch.Generator().manual_seed(seed)
    sc.convert(net, X)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm) and module.affine:
                module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.1)
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator))
            elif isinstance(module, nn.Conv2d):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return net.train()


def train(net, optimizer, steps=1):
    for _ in range(steps):
        out = net(X).flatten(1)
        loss = F.cross_entropy(out, torch.arange(4) % out.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def has_gather(graph_module):
    return any("index" in str(node.target) for node in graph_module.graph.nodes)


class Head(nn.Sequential):
    """What reads a trunk last: pooling and a linear layer, which is not selective."""

    def __init__(self, width, outputs=4):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))


def squeeze_excite(net, x):
    x = net.a(x)
    scale = torch.sigmoid(net.up(F.relu(net.down(x.mean((2, 3), keepdim=True)))))
    return net.head(net.b(x * scale))


def by_hand(shape):
    """A residual block whose squeeze-excite has linear layers; `shape` makes maps of features."""

    def run(net, x):
        x = net.a(x)
        y = net.b(x)
        scale = torch.sigmoid(net.up(F.relu(net.down(y.mean((2, 3)) + y.amax((2, 3))))))
        return net.head(x + y * shape(scale, y))

    return lambda: Net(
        run, a=conv(3, 16), b=conv(16, 16), down=nn.Linear(16, 8), up=nn.Linear(8, 16),
        head=Head(16),
    )  # fmt: skip


def padded_trunk(net, x):
    x = net.a(x)
    return net.head(F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, 8)) + net.b(F.avg_pool2d(x, 2)))


def unet(net, x):
    x = net.a(x)
    return net.out(torch.cat([x, net.up(net.b(F.max_pool2d(x, 2)))], 1))


NETS = {
    "chain": lambda: nn.Sequential(conv(3, 16), conv(16, 24), Head(24)),
    "flattened maps": lambda: nn.Sequential(
        conv(3, 16), conv(16, 16), nn.Flatten(), nn.Linear(1024, 4)
    ),
    "linear layers": lambda: nn.Sequential(
        conv(3, 16), conv(16, 16), Head(16, 24), nn.ReLU(), nn.Linear(24, 4)
    ),
    "residual sum": lambda: Net(
        lambda n, x: n.head(F.relu((y := n.a(x)) + n.c(n.b(y)))),
        a=conv(3, 16), b=conv(16, 24), c=conv(24, 16)[:2], head=Head(16),
    ),
    "concatenation": lambda: Net(
        lambda n, x: n.head(torch.cat([y := n.a(x), n.b(y)], 1)),
        a=conv(3, 16), b=conv(16, 12), head=Head(28),
    ),
    "padded and pooled trunk": lambda: Net(
        padded_trunk, a=conv(3, 16), b=conv(16, 24), head=Head(24)
    ),
    "squeeze-excite": lambda: Net(
        squeeze_excite, a=conv(3, 16), down=nn.Conv2d(16, 8, 1), up=nn.Conv2d(8, 16, 1),
        b=conv(16, 12), head=Head(12),
    ),
    "features[:, :, None, None]": by_hand(lambda y, x: y[:, :, None, None]),
    "features[..., None, None]": by_hand(lambda y, x: y[..., None, None]),
    "features.unsqueeze": by_hand(lambda y, x: y.unsqueeze(-1).unsqueeze(-1)),
    "features.view, expand_as": by_hand(lambda y, x: y.view(x.shape[0], -1, 1, 1).expand_as(x)),
    "features.reshape": by_hand(lambda y, x: y.reshape(x.size(0), x.size(1), 1, 1)),
    "depthwise": lambda: nn.Sequential(
        conv(3, 64, 1), conv(64, 64, groups=64), conv(64, 16, 1), Head(16)
    ),
    "groups": lambda: nn.Sequential(
        conv(3, 16, 1), conv(16, 32, groups=4), conv(32, 16, 1), Head(16)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), conv(16, 12), Head(12)
    ),
    "transposed conv": lambda: Net(
        unet, a=conv(3, 16), b=conv(16, 24), up=nn.ConvTranspose2d(24, 16, 2, stride=2),
        out=nn.Conv2d(32, 4, 1),
    ),
    "plain conv": lambda: nn.Sequential(
        conv(3, 16), nn.Conv2d(16, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 12),
        Head(12),
    ),
    "norm without parameters": lambda: Net(
        lambda n, x: n.head((y := n.a(x)) + n.b(F.relu(n.norm(y)))),
        a=nn.Conv2d(3, 16, 3, padding=1), norm=nn.BatchNorm2d(16, affine=False),
        b=nn.Conv2d(16, 16, 3, padding=1), head=Head(16),
    ),
    "no norms": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), Head(24)
    ),
}  # fmt: skip


# Whole filters of such small networks cost more than a hundredth of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*was not met", "ignore:.*weight decay of 0")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_closed_filters_stay_closed_and_vanish(net, optimizer):
    net = drawn(net())
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    trainer = optimizer(sc.param_groups(net), lr=0.01, weight_decay=1e-2, **options)
    steps = allocator(net, trainer, target_params=0.6)
    for epoch in range(4):
        train(net, trainer)
        steps.step(epoch)
    left = sc.count(net, X[:1]).params
    assert left / steps.budget.dense == pytest.approx(0.6, abs=0.06)
    train(net, trainer, steps=3)
    assert sc.count(net, X[:1]).params == left
    small = sc.compress(net, X)
    torch.testing.assert_close(small(X), net.eval()(X), rtol=1e-4, atol=1e-5)
    assert not has_gather(small)
    assert sum(p.numel() for p in small.parameters()) == left


@pytest.mark.parametrize(("width", "block"), [(24, 1), (36, 1), (32, 8), (64, 8)])
def test_one_reader_is_closed_as_algorithm_1_closes_it_by_whole_blocks(width, block):
    net = drawn(nn.Sequential(conv(3, width, 1), conv(width, 16, 1)), seed=1)
    necdm = net[1][0].ecdm(normalized=True, damage="auto")
    order = necdm.amax(dim=1).argsort(stable=True)
    number = len(sc.functional.choose_dealloc(necdm, 0.5)) // block * block
    assert 1 < number < width
    assert allocator(net, gamma=0.5).dealloc().deallocated == {
        "1.0": sorted(order[:number].tolist())
    }


def naive_levels(shares):
    """The level of each group, by loops; `shares[reader][output][group]`, 0 where it is unread."""
    groups = range(len(shares[0][0]))
    worst = [max(row[g] for reader in shares for row in reader) for g in groups]
    levels = {}
    for group in groups:
        earlier = [g for g in groups if (worst[g], g) <= (worst[group], group)]
        levels[group] = max(
            sum(row[g] for g in earlier)
            for reader in shares
            if any(row[group] for row in reader)
            for row in reader
        )
    return levels


def test_no_output_of_any_reader_loses_more_than_gamma():
    net = drawn(
        Net(
            lambda n, x: n.b(y := n.a(x)) + n.c(torch.cat([n.d(x), y], 1)),
            a=conv(3, 12, 1), b=conv(12, 9, 1), c=conv(20, 9, 1), d=conv(3, 8, 1),
        )
    )  # fmt: skip
    shares = [net.get_submodule(name)[0].ecdm(normalized=True).double() for name in "bc"]
    # Twelve channels of a, then eight of d; c reads d's first.
    by_group = [torch.zeros(9, 20, dtype=torch.float64) for _ in "bc"]
    by_group[0][:, :12] = shares[0].t()
    by_group[1][:, :12], by_group[1][:, 12:] = shares[1].t()[:, 8:], shares[1].t()[:, :8]
    levels = naive_levels([one.tolist() for one in by_group])
    for gamma in (0.15, 0.3, 0.5):
        closed = {g for g, level in levels.items() if level <= gamma}
        assert closed
        report = allocator(copy.deepcopy(net), gamma=gamma).dealloc()
        assert set(report.deallocated.get("b.0", [])) == {g for g in closed if g < 12}
        assert set(report.deallocated["c.0"]) == {g + 8 if g < 12 else g - 12 for g in closed}
        assert max(one[:, list(closed)].sum(1).max() for one in by_group) <= gamma


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (lambda: nn.Sequential(conv(3, 16), nn.Conv2d(16, 8, 1)), None),
        (
            lambda: nn.Sequential(conv(3, 8), nn.LayerNorm([8, 8, 8]), nn.Conv2d(8, 4, 1)),
            r"LayerNorm",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.Conv2d(8, 4, 1)),
            "GroupNorm) normalises all",
        ),
        (lambda: Net(lambda n, x: n.b(n.b(n.a(x))), a=conv(3, 8), b=conv(8, 8)), "called twice"),
        (
            lambda: nn.Sequential(
                conv(3, 8), nn.Sigmoid(), nn.ConvTranspose2d(8, 9, 1), conv(9, 9)
            ),
            "cannot be made zero",
        ),
    ],
    ids=["free", "layer norm", "one group", "called twice", "never zero"],
)
def test_what_holds_filters(net, reason):
    net = drawn(net())
    if reason is None:
        assert allocator(net, gamma=0.5).dealloc().deallocated
        assert "its filters stay: an output of the model" in str(sc.describe(net))
        return
    with contextlib.suppress(sc.AllocationError):  # where nothing is left to close
        allocator(net)
    assert reason in str(sc.describe(net))


def test_frozen_layers_keep_what_they_make_and_read():
    net = drawn(nn.Sequential(conv(3, 16), conv(16, 16), conv(16, 16), Head(16)))
    steps = allocator(net, gamma=0.5)
    net[1][0].weight.requires_grad_(False)
    assert set(steps.dealloc().deallocated) == {"3.2"}
    net.requires_grad_(False)
    assert not steps.dealloc()  # nothing is left to close
    net.requires_grad_(True)
    assert "1.0" in steps.dealloc().deallocated
    for module in net.modules():
        module.requires_grad_(not isinstance(module, nn.BatchNorm2d))
    with pytest.warns(sc.SelectConvWarning, match="frozen layers"):
        allocator(net)
    assert "its filters stay: frozen" in str(sc.describe(net))


def test_filters_that_momentum_opens_again_are_told():
    net = drawn(NETS["chain"]())
    trainer = torch.optim.SGD(sc.param_groups(net), lr=0.1, momentum=0.9)
    train(net, trainer)
    steps = allocator(net, gamma=0.5)
    steps.step(0)
    train(net, trainer)
    with pytest.warns(sc.SelectConvWarning, match="opened again"):
        steps.step(1)
    with pytest.raises(sc.AllocationError, match=r"does not own .*'2\.2\.weight'"):
        allocator(net, torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], 0.1))


def test_refused_in_one_line():
    net = drawn(nn.Sequential(conv(3, 16), conv(16, 8)))
    with pytest.raises(ValueError, match=r"`granularity`.*'channel'"):
        sc.ChannelAllocator(net, total_epochs=2, granularity="channel")
    with pytest.raises(ValueError, match=r"'filter'.*'dealloc'.*'select'"):
        sc.ChannelAllocator(net, total_epochs=2, granularity="filter", example_input=X)
    with pytest.raises(ValueError, match="'filter' needs an `example_input`"):
        sc.ChannelAllocator(net, total_epochs=2, granularity="filter", mode="dealloc")
    with pytest.raises(sc.MeanSourceError, match="seen any input"):
        allocator(drawn(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), Head(8)))).step(0)


def test_resume_replay_preview_and_followers():
    def build():
        net = drawn(NETS["no norms"]())
        trainer = torch.optim.SGD(sc.param_groups(net), lr=0.05, momentum=0.9, weight_decay=1e-3)
        return net, trainer

    net, trainer = build()
    average = copy.deepcopy(net)
    steps = allocator(net, trainer, target_macs=0.5, followers=[average])
    fresh, log = copy.deepcopy(net), []
    for epoch in range(2):
        train(net, trainer)
        preview = steps.preview()
        report = steps.step(epoch)
        assert report
        assert preview.deallocated == report.deallocated
        log.append(json.loads(json.dumps(report.to_dict())))
    saved = copy.deepcopy([one.state_dict() for one in (net, trainer, steps)])
    assert sc.count(average, X[:1]) == sc.count(net, X[:1])
    allocator(fresh, gamma=0.1).replay(log)
    assert sc.count(fresh, X[:1]) == sc.count(net, X[:1])
    again, other = build()
    resumed = allocator(again, other, target_macs=0.5)
    for one, state in zip((again, other, resumed), saved, strict=True):
        one.load_state_dict(state)
    for one, optimizer, its in ((net, trainer, steps), (again, other, resumed)):
        for epoch in (2, 3):
            train(one, optimizer)
            its.step(epoch)
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_plan_that_does_not_fit_changes_nothing():
    net = drawn(NETS["chain"]())
    before = copy.deepcopy(net.state_dict())
    for layers in (
        {"2.2": {"closed": [24], "opened": []}},
        {"0.0": {"closed": [], "opened": [], "filters": [16]}},
        {"0.2": {"closed": [], "opened": [], "filters": [0]}},
    ):
        with pytest.raises(sc.AllocationError, match=next(iter(layers))):
            allocator(net).apply(sc.AllocationPlan.from_dict(layers))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_channels_that_save_nothing_are_spared():
    net = drawn(NETS["features.unsqueeze"]())
    steps = allocator(net, target_macs=0.5, total_epochs=1)
    net(X)  # for inputs that are observed
    steps.step(0)
    small = sc.compress(net, X)
    assert (small.down.out_features, small.get_submodule("a.0").out_channels < 16) == (8, True)


def test_steps_count_what_plain_convs_still_read():
    torch.manual_seed(0)
    widths = ((3, 24), (24, 32), (32, 40))
    convs = [nn.Conv2d(*width, 3, padding=1) for width in widths]
    net = nn.Sequential(*(part for own in convs for part in (own, nn.ReLU())), Head(40))
    sc.convert(net, X, where=lambda name, _: name == "2")
    trainer = torch.optim.SGD(sc.param_groups(net), lr=1e-3)
    steps = allocator(net, trainer, target_macs=0.5)
    for epoch in range(4):
        train(net, trainer)
        steps.step(epoch)
        left = sc.count(net, X[:1]).macs / steps.budget.dense
        assert left == pytest.approx((0.875, 0.75, 0.625, 0.5)[epoch], abs=0.03)


@pytest.mark.parametrize("width", [24, 64])  # single channels, and blocks of eight
def test_auto_closes_a_share_of_the_filters(width):
    net = drawn(nn.Sequential(conv(3, width), conv(width, width), Head(width)))
    trainer = torch.optim.SGD(sc.param_groups(net), lr=0.05, weight_decay=1e-3)
    steps = allocator(net, trainer, gamma="auto")
    for epoch in range(4):
        train(net, trainer)
        steps.step(epoch)
    small = sc.compress(net, X)
    assert 0.7 <= small.get_submodule("2.2").in_features / width < 1
