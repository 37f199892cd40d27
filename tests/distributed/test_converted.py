"""Converted networks under DDP, and observed moments that are those of all ranks together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import selectconv as sc
from architectures import ARCHITECTURES
from forked import RANKS, spawn
from tiny_models import assert_same, conv_net, select_layers, train

NAMES = ("residual, grouped", "dense, norms that activate", "shuffle")
STEPS = 2
# Sums over the ranks in another order, in float32 buffers.
TOLERANCE = 1e-5


def batch(rank, step, side, images=2):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(images, 3, side, side, generator=generator)


def work(rank):
    results = {name: train_in_parallel(rank, name) for name in NAMES}
    results["observed"] = observe(rank)
    results["alone"] = observe(rank, pooled=False)
    results["refused"] = refusal()
    return results


def train_in_parallel(rank, name):
    architecture = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = architecture.create()
    sc.convert(model, batch(0, 0, architecture.side))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    allocator = sc.ChannelAllocator(wrapped, optimizer, total_epochs=10, gamma=0.1)
    reports = []
    for step in range(STEPS):
        train(wrapped, optimizer, 1, seed=2 * step + rank, count=2, size=architecture.side)
        reports.append(allocator.step(step).plan.to_dict())
    learned = {name: value.detach().clone() for name, value in model.named_parameters()}
    kept = ("gate", "index", "moved", "shifted", "observed_mean", "observed_var")
    for key, layer in select_layers(model).items():
        learned |= {f"{key}.{b}": getattr(layer, b).clone() for b in kept if hasattr(layer, b)}
    return {"reports": reports, "state": learned}


def observing(pooled):
    layer = sc.SelectConv2d(3, 2, 1)
    layer.mean_source = sc.ObservedMean(pooled=pooled)
    return layer


def inputs(rank, step):
    """Batches of different sizes, means and spreads; rank 1's second one is empty."""
    images = 0 if (rank, step) == (1, 1) else 2 + rank
    return batch(rank, step, 4, images) * (1 + rank) + 3 * rank


def observe(rank, pooled=True):
    layer = observing(pooled)
    for step in range(3):
        layer(inputs(rank, step))
    return {"mean": layer.observed_mean, "var": layer.observed_var, "n": layer.observed_batches}


def refusal():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))
    with pytest.raises(sc.ConversionError) as caught:
        sc.convert(DistributedDataParallel(model))
    return str(caught.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("timm", reason="timm is not installed")
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    return spawn(work, tmp_path_factory.mktemp("ranks"), timeout_s=110)  # both import timm


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_same_network(ranks, name):
    assert_same(ranks[0][name], ranks[1][name])
    assert any(ranks[0][name]["reports"])  # something was allocated


def test_observed_moments_are_those_of_all_ranks_together(ranks):
    assert_same(ranks[0]["observed"], ranks[1]["observed"])
    together = observing(pooled=False)
    for step in range(3):
        together(torch.cat([inputs(rank, step) for rank in RANKS]))
    observed = ranks[0]["observed"]
    assert int(observed["n"]) == 3
    for key, expected in (("mean", together.observed_mean), ("var", together.observed_var)):
        torch.testing.assert_close(observed[key], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_each_rank_observes_its_own_batches_where_asked_to(ranks):
    for rank in RANKS:
        layer = observing(pooled=False)
        for step in range(3):
            layer(inputs(rank, step))
        assert torch.equal(ranks[rank]["alone"]["mean"], layer.observed_mean)
        assert int(ranks[rank]["alone"]["n"]) == (3 if rank == 0 else 2)


def test_wrapped_models_are_refused(ranks):
    for rank in RANKS:
        assert "is wrapped in DistributedDataParallel" in ranks[rank]["refused"]


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = conv_net()
    fully_shard(model.conv1, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="`model` is sharded by FSDP, which is not supported"):
        sc.ChannelAllocator(model, total_epochs=2)
