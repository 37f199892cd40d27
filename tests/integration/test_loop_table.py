"""The table of docs/loops.md, row by row: what people do to a loop works, or is told in one line.

The docs say what happens; the functions here do it. A row without a function fails, and a function
without a row does, too.
"""

import copy
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import selectconv as sc
from tiny_models import (
    allocation_of,
    assert_same,
    conv_net,
    decay,
    images,
    outputs,
    select_layers,
    shifted_net,
)

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
X, LABELS = images()
ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| (?P<kind>works|warning|refused)\b(?P<rest>[^|]*)\|$", re.M
)
TABLE = {found["name"]: found for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
DONE = {}


def does(name):
    """Register the function that does what a row of the table names."""

    def register(act):
        DONE[name] = act
        return act

    return register


def sgd(model, **options):
    return torch.optim.SGD(sc.param_groups(model), 0.1, 0.9, weight_decay=1e-4, **options)


def train(model, optimizer, **backward):
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(X), LABELS).backward(**backward)
        optimizer.step()


def build(model=None, optimizer=None, **options):
    model = conv_net() if model is None else model
    optimizer = optimizer or sgd(model)
    options = {"total_epochs": 8, "gamma": 0.3, **options}
    return model, optimizer, sc.ChannelAllocator(model, optimizer, **options)


def run(model, optimizer, allocator, epochs=range(3), after=lambda epoch: None, **backward):
    """Train and step; slots must move, in the model and in what the optimizer remembers."""
    moved = 0
    for epoch in epochs:
        train(model, optimizer, **backward)
        after(epoch)
        moved += len(allocator.step(epoch).reallocated)
    assert moved
    return model


def fades(optimizer_of):
    """Check that weights decay and shifts do not, also those of a group that is added later."""
    model = shifted_net()
    optimizer = optimizer_of(model)
    build(model, optimizer)
    left = decay(optimizer, model)
    for name in select_layers(model):
        assert left[f"{name}.weight"] < 0.9 < 0.99 < left[f"{name}.shift"]


# Optimizers


@does("`SGD(model.parameters(), weight_decay=...)`")
def _():
    fades(lambda model: torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.05))


@does("timm's `create_optimizer_v2`, also with `layer_decay`")
def _():
    optim = pytest.importorskip("timm.optim")
    for more in ({}, {"layer_decay": 0.7}):
        fades(lambda model, m=more: optim.create_optimizer_v2(model, "adamw", 1e-2, 1.0, **m))


@does("a group for each parameter, as Detectron2 has it")
def _():
    fades(
        lambda model: torch.optim.SGD(
            [{"params": [p], "weight_decay": 0.05 * (p.ndim > 1)} for p in model.parameters()], 0.1
        )
    )


@does(
    "a group of shifts alone, with the weights' decay; a schedule that sets the decay of all groups"
)
def _():
    def alone(model):
        params = list(model.parameters())
        groups = [{"params": [p for p in params if p.ndim == axes]} for axes in (1, 2, 4)]
        return torch.optim.SGD(groups, 0.1, weight_decay=0.05)

    def scheduled(model):
        optimizer = torch.optim.SGD(sc.param_groups(model), 0.1)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.05
        return optimizer

    fades(alone)
    fades(scheduled)


@does("a fine-tuning with an optimizer of its own, and no allocator")
def _():
    model = shifted_net()
    left = decay(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.05), model)
    assert left["conv1.weight"] < 0.9 < 0.99 < left["conv1.shift"]


@does("one optimizer for two models, each with an allocator")
def _():
    ours, theirs = conv_net(), conv_net()
    both = nn.ModuleList([ours, theirs])
    optimizer = torch.optim.SGD(both.parameters(), 0.1, 0.9, weight_decay=1e-4)
    _, _, one = build(ours, optimizer)
    _, _, other = build(theirs, optimizer)
    run(ours, optimizer, one, after=lambda epoch: train(theirs, optimizer))
    run(theirs, optimizer, other)
    assert len(optimizer.param_groups[0]["params"]) == 2 * len(list(ours.parameters()))


@does("timm's Lookahead, SAM and other optimizers around an optimizer")
def _():
    optim = pytest.importorskip("timm.optim")
    fades(lambda model: optim.create_optimizer_v2(model, "lookahead_adamw", 1e-2, 1.0))
    model = conv_net()
    optimizer = optim.create_optimizer_v2(model, "lookahead_momentum", 0.1, 1e-4)
    run(model, optimizer, sc.ChannelAllocator(model, optimizer, total_epochs=8, gamma=0.3))
    for layer in select_layers(model).values():
        seen = optimizer._base_optimizer.state[layer.weight]
        fresh = layer.weight.abs().sum(dim=(0, 2, 3)) == 0
        assert fresh.any()
        for value in seen.values():
            assert not value[:, fresh].any()


@does("`optimizer.step` is interrupted, and its state saved")
def _():
    model = shifted_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.05)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    torch.optim.SGD(model.parameters(), 0.1).load_state_dict(optimizer.state_dict())


@does("`add_param_group` in mid-run, for a part that was frozen")
def _():
    model = conv_net()
    model.conv1.requires_grad_(False)
    model, optimizer, allocator = build(model)
    run(model, optimizer, allocator, range(1))
    nn.init.uniform_(model.conv1.requires_grad_(True).shift, -1.5, 1.5)
    before = model.conv1.shift.detach().abs().mean()
    optimizer.add_param_group({"params": list(model.conv1.parameters()), "weight_decay": 10.0})
    run(model, optimizer, allocator, range(1, 3))
    assert model.conv1.moved.any()
    assert model.conv1.shift.detach().abs().mean() > 0.5 * before


@does("a part is unfrozen, but not given to the optimizer")
def _():
    model = conv_net()
    model.conv1.requires_grad_(False)
    model, optimizer, allocator = build(model)
    run(model, optimizer, allocator, range(1))
    model.conv1.requires_grad_(True)
    run(model, optimizer, allocator, range(1, 3))


@does("a list of optimizers")
def _():
    model = conv_net()
    own = [torch.optim.SGD(model.conv1.parameters(), 0.1, 0.9, weight_decay=1e-4)]
    rest = [p for n, p in model.named_parameters() if not n.startswith("conv1")]
    own.append(torch.optim.AdamW(rest, 1e-3))
    allocator = build(model, own)[2]
    for one in own:
        train(model, one)
    model.conv1.close([2])
    allocator.realloc()
    assert model.conv1.moved[2]
    assert not own[0].state[model.conv1.weight]["momentum_buffer"][:, 2].any()


@does("an optimizer in a wrapper that has it as `.optimizer` (Accelerate)")
def _():
    class Wrapped(torch.optim.Optimizer):
        param_groups = state = property(lambda self: vars(self.optimizer))

        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = conv_net()
    optimizer = sgd(model)
    run(model, optimizer, build(model, Wrapped(optimizer))[2])


@does("`backward(create_graph=True)`, AdaHessian")
def _():
    optim = pytest.importorskip("timm.optim")
    model = sc.create_model("densenet40", growth_rate=4, units=(1, 1, 1), selective=True)
    optimizer = optim.Adahessian(sc.param_groups(model), 0.1, weight_decay=1e-4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph")
        run(model, optimizer, build(model, optimizer)[2], range(2), create_graph=True)


@does("a new optimizer in mid-run")
def _():
    model, optimizer, allocator = build()
    run(model, optimizer, allocator, range(1))
    run(model, sgd(model), allocator, range(1, 3))


@does("a new optimizer in mid-run, set as `allocator.optimizer`")
def _():
    model, optimizer, allocator = build()
    run(model, optimizer, allocator, range(1))
    allocator.optimizer = optimizer = sgd(model)
    train(model, optimizer)
    moved = allocator.step(1).reallocated
    assert moved
    for name, slots in moved.items():
        state = optimizer.state[select_layers(model)[name].weight]["momentum_buffer"]
        assert not state[:, slots].any()


@does("the optimizer is built before `convert`")
def _():
    model = conv_net(convert=False)
    optimizer = sgd(model)
    build(sc.convert(model), optimizer)


@does("`load_state_dict(..., assign=True)` after the optimizer was built")
def _():
    model, optimizer, allocator = build()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    run(model, optimizer, allocator)


@does("an optimizer without weight decay")
def _():
    model = conv_net()
    build(model, torch.optim.SGD(model.parameters(), 0.1))


@does("Adafactor and other optimizers with factored state")
def _():
    model = conv_net()
    run(*build(model, torch.optim.Adafactor(model.parameters(), weight_decay=0.01)))


# Averages


def follow(average, update, **options):
    """Train with an average; return it, and the model."""
    model = conv_net()
    ema = average(model)
    followers = [ema] if options.pop("follows", True) else []
    parts = build(model, followers=followers)
    run(*parts, after=lambda epoch: update(ema, model))
    return ema, model


def lerp(ema, model):
    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.5)


def torch_average(model, **options):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), **options)


@does("torch's `AveragedModel` among `followers`")
def _():
    ema, model = follow(torch_average, lambda ema, model: ema.update_parameters(model))
    assert_same(allocation_of(ema.module), allocation_of(model))


@does("timm's `ModelEmaV3` among `followers`; `compress` and `count` of it")
def _():
    utils = pytest.importorskip("timm.utils")
    ema, model = follow(utils.ModelEmaV3, lambda ema, model: ema.update(model))
    assert_same(allocation_of(ema.module), allocation_of(model))
    torch.testing.assert_close(outputs(sc.compress(ema, X)), outputs(ema.module))
    assert sc.count(ema, X) == sc.count(ema.module, X)


@does("timm's `ModelEmaV2` among `followers`")
def _():
    utils = pytest.importorskip("timm.utils")
    follow(utils.ModelEmaV2, lambda ema, model: ema.update(model))


@does("`AveragedModel(use_buffers=True)`")
def _():
    follow(lambda model: torch_average(model, use_buffers=True), None)


@does("an `AveragedModel` that is not among `followers`")
def _():
    follow(torch_average, lambda ema, model: ema.update_parameters(model), follows=False)


@does("a deep copy that averages, and is not among `followers`")
def _():
    follow(copy.deepcopy, lerp, follows=False)


@does("a deep copy that is trained by itself")
def _():
    model, optimizer, allocator = build()
    other = copy.deepcopy(model)
    its = sgd(other)

    def train_other(epoch):
        train(other, its)
        its.zero_grad()

    run(model, optimizer, allocator, after=train_other)


@does("`ModelEmaV3` is restored without its state, and updated")
def _():
    utils = pytest.importorskip("timm.utils")
    trained, _, before = build()
    run(trained, before.optimizer, before, range(2))
    model = conv_net()
    ema, optimizer = utils.ModelEmaV3(model), sgd(model)
    model.load_state_dict(trained.state_dict())
    _, _, allocator = build(model, optimizer, followers=[ema])
    allocator.load_state_dict(before.state_dict())
    run(model, optimizer, allocator, range(2, 4), after=lambda epoch: ema.update(model))


@does("a teacher inside the model averages the rest of it")
def _():
    model = nn.ModuleDict({"student": conv_net()})
    model["teacher"] = copy.deepcopy(model["student"]).requires_grad_(False)
    model.forward = model["student"].forward

    @torch.no_grad()
    def average(epoch):
        pairs = zip(model["teacher"].parameters(), model["student"].parameters(), strict=True)
        for mean, value in pairs:
            mean.lerp_(value, 0.1)

    run(*build(model), after=average)


@does("a follower is restored without its state")
def _():
    model, optimizer, allocator = build()
    ema = copy.deepcopy(model)
    run(model, optimizer, allocator, range(2))
    resumed = build(model, optimizer, followers=[ema])[2]
    resumed.load_state_dict(allocator.state_dict())
    run(model, optimizer, resumed, range(2, 3))


def fit_lightning(**options):
    pl = pytest.importorskip("lightning.pytorch")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    integration = pytest.importorskip("selectconv.integrations.lightning")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = conv_net()

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self)

    module, allocation = Module(), integration.ChannelAllocation(gamma=0.3)
    averaging = callbacks.EMAWeightAveraging(decay=0.5, **options)
    trainer = pl.Trainer(
        max_epochs=4, callbacks=[averaging, allocation], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(module, loader)
    assert allocation.reports
    planned = {
        (name, slot): source
        for report in allocation.reports
        for name, plan in report.plan
        for slot, source in zip(plan.opened.tolist(), plan.source.tolist(), strict=True)
    }
    for (name, slot), source in planned.items():
        assert module.get_submodule(name).index[slot] == source


@does("Lightning's `EMAWeightAveraging(use_buffers=False)`")
def _():
    fit_lightning(use_buffers=False)


@does("Lightning's `EMAWeightAveraging()`, which averages buffers")
def _():
    fit_lightning()


# Steps


@does("a step in every second epoch, with a target")
def _():
    model, optimizer, allocator = build(
        conv_net(width=64), mode="dealloc", target_params=0.5, example_input=X
    )
    dense = sc.count(model, X).params
    for epoch in range(0, 8, 2):
        train(model, optimizer)
        allocator.step(epoch)
    assert sc.count(model, X).params == pytest.approx(0.5 * dense, rel=0.01)


@does("steps without training in between")
def _():
    allocator = build()[2]
    allocator.step(0)
    allocator.step(1)


@does("a deep copy is trained, and the original stepped")
def _():
    model, _, allocator = build()
    trained = copy.deepcopy(model)
    run(trained, sgd(trained), allocator)


@does("an epoch is stepped twice")
def _():
    allocator = build()[2]
    allocator.step(0)
    allocator.step(0)


@does("more steps than `total_epochs`")
def _():
    build(total_epochs=2)[2].step(2)


@does("two allocators on one model")
def _():
    model, optimizer, allocator = build()
    other = build(model, optimizer)[2]
    run(model, optimizer, allocator, after=other.step)


@does("`step` between forward and backward")
def _():
    model, _, allocator = build()
    loss = model(X).sum()
    assert allocator.step(0)
    loss.backward()


@does("`step` under `torch.inference_mode`")
def _():
    model, optimizer, allocator = build()
    train(model, optimizer)
    with torch.inference_mode():
        assert allocator.step(0)
    run(model, optimizer, allocator, range(1, 3))


@does("`gamma=1`, meant as 1%")
def _():
    build(gamma=1)


@does("gradient accumulation, bfloat16 autocast, GradScaler and clipping")
def _():
    model, optimizer, allocator = build()
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(X), LABELS)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert allocator.step(epoch)


# The model


@does("a frozen encoder")
def _():
    model = conv_net()
    model[:4].requires_grad_(False)
    kept = copy.deepcopy(dict(model.conv1.state_dict()))
    run(*build(model))
    assert_same(dict(model.conv1.state_dict()), kept)
    assert model.conv2.moved.any()


@does("everything is frozen")
def _():
    model = conv_net().requires_grad_(False)
    head = torch.optim.SGD(model.head.requires_grad_(True).parameters(), 0.1, weight_decay=1e-4)
    sc.ChannelAllocator(model, head, total_epochs=4)


@does("weights are tied after `convert`")
def _():
    model = conv_net()
    model.conv1, model.conv2 = (sc.SelectConv2d(12, 12, 1) for _ in range(2))
    for layer in (model.conv1, model.conv2):
        layer.mean_source = sc.ObservedMean()
    model.conv2.weight = model.conv1.weight
    run(*build(model))


@does("`prune`, `weight_norm` or another hook that recomputes the weight")
def _():
    model, optimizer, allocator = build()
    prune.l1_unstructured(model.conv1, "weight", amount=0.5)
    run(model, optimizer, allocator)


@does("a batch norm is replaced after `convert`")
def _():
    model, _, allocator = build()
    model.norm2 = nn.BatchNorm2d(12)
    allocator.step(0)


@does("`SyncBatchNorm.convert_sync_batchnorm` after `convert`")
def _():
    model, _, allocator = build()
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert allocator.step(0)


@does("the training diverges to NaN")
def _():
    model, _, allocator = build()
    nn.init.constant_(model.conv1.weight, torch.nan)
    allocator.step(0)


@does("`convert` of `ddp.module`, after wrapping")
def _():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(conv_net(convert=False))
    sc.convert(wrapped.module)


@does("`convert` under `torch.inference_mode`")
def _():
    model = conv_net(convert=False)
    with torch.inference_mode():
        sc.convert(model, X)
    run(*build(model))


@does("`convert` twice")
def _():
    sc.convert(conv_net(), X)


@does("`torch.compile(model)`")
def _():
    model = conv_net()
    run(*build(torch.compile(model, backend="eager"), sgd(model)))


@does("`torch.jit.script(model)`")
def _():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.script(conv_net())


# Checkpoints


@does("a checkpoint without the allocator's state")
def _():
    model, optimizer, allocator = build()
    run(model, optimizer, allocator, range(2))
    run(model, optimizer, build(model, optimizer)[2], range(2, 3))


@does("a checkpoint of model, optimizer and allocator")
def _():
    parts = build()
    run(*parts, range(2))
    again = build()
    for part, old in zip(again, parts, strict=True):
        part.load_state_dict(copy.deepcopy(old.state_dict()))
    assert_same(
        dict(run(*again, range(2, 4)).state_dict()), dict(run(*parts, range(2, 4)).state_dict())
    )


@does("`torch.save(allocator)`")
def _():
    torch.save(build()[2], io.BytesIO())


def test_the_table_and_this_file_have_the_same_rows():
    assert list(TABLE) == list(DONE)
    assert len(TABLE) >= 30


@pytest.mark.filterwarnings("default:no weight has changed")
@pytest.mark.parametrize("name", TABLE)
def test_a_row_does_what_the_table_says(name):
    kind, quoted = TABLE[name]["kind"], re.findall(r'"([^"]+)"', TABLE[name]["rest"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "refused":
            with pytest.raises((sc.SelectConvError, TypeError, RuntimeError)) as refusal:
                DONE[name]()
            said = str(refusal.value)
        else:
            DONE[name]()
            ours = [one.message for one in caught if one.category is sc.SelectConvWarning]
            said = "".join(map(str, ours))
    assert (kind == "works") == (said == ""), said
    assert all(words in said for words in quoted), said
    assert len(quoted) == (kind != "works")
