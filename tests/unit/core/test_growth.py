"""Growth by gradient: the sums that training steps give, and what is chosen from them."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import selectconv as sc
from selectconv.core import gradients
from selectconv.core.gradients import LAGS, GradientStatistics, autocovariance
from selectconv.core.growth import _covariances, _Search, _weigh, choose_by_gradient
from selectconv.core.plan import LayerPlan
from selectconv.core.shift import reroute
from selectconv.errors import AllocationError

CONVS = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}
KINDS = [
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 1, "padding": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 2},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 1, "groups": 2},
    {"kernel_size": 3, "groups": 2, "padding": 1},
    {"kernel_size": 2},
]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let statistics use every pixel and every output."""
    monkeypatch.setattr(gradients, "_PIXELS", 10**6)
    monkeypatch.setattr(gradients, "_ROWS", 10**6)


def _watched(layer: sc.SelectConv2d, **options: object) -> GradientStatistics:
    statistics = GradientStatistics(layer, **options)
    statistics.schedule.every = 1
    layer.statistics = statistics
    return statistics


def _open_slot(layer: sc.SelectConv2d, slot: int, source: int, shift: list[float]) -> None:
    """Let a slot read a channel at a shift, with weights of zero."""
    plan = LayerPlan(
        closed=torch.tensor([slot]),
        opened=torch.tensor([slot]),
        source=torch.tensor([source]),
        shift=torch.tensor([shift]),
    )
    layer.apply_plan(plan)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("axes", [1, 2])
def test_sums_are_the_gradients_of_slots_that_would_be_opened(axes: int, options: dict) -> None:
    torch.manual_seed(0)
    layer = CONVS[axes](4, 6, bias=False, **options)
    statistics = _watched(layer)
    slot, source = 3, 1
    with torch.no_grad():
        layer.weight[:, slot % layer.weight.shape[1]] = 0.0
    _open_slot(layer, 2, 0, [0.6] * axes)  # a slot that reads something else already
    x = torch.randn(5, 4, *[7, 6][:axes])
    toward = torch.randn_like(layer(x))
    layer.statistics.forget()
    (layer(x) * toward).sum().backward()
    groups, width = layer.groups, 4 // layer.groups
    outputs = 6 // groups
    norm = layer.weight.detach().flatten(1).norm(dim=1)
    group = slot // width
    candidates = statistics.sums["candidates"].sum(dim=0)[group, :, source]
    for place, offset in enumerate(statistics.offsets.tolist()):
        twin = copy.deepcopy(layer)
        _open_slot(twin, slot, source, offset)
        twin.zero_grad()
        (twin(x) * toward).sum().backward()
        rows = slice(group * outputs, (group + 1) * outputs)
        own = twin.weight.grad[rows, slot % width].flatten(1) * norm[rows, None]
        torch.testing.assert_close(candidates[:, place], own.flatten(), atol=1e-4, rtol=1e-4)
    rows = slice((2 // width) * outputs, (2 // width + 1) * outputs)
    moved = layer.weight.grad[rows, 2 % width].flatten(1) * norm[rows, None]
    got = statistics.sums["slots"].sum(dim=0)[2 // width, :, 2]
    torch.testing.assert_close(got, moved.flatten(), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("whole")
def test_halves_are_the_even_and_the_odd_images() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv2d(3, 4, 1, bias=False)
    statistics = _watched(layer)
    x, toward = torch.randn(6, 3, 5, 5), torch.randn(6, 4, 5, 5)
    (layer(x) * toward).sum().backward()
    norm = layer.weight.detach().flatten(1).norm(dim=1)
    for half in (0, 1):
        own = torch.einsum("nohw,nchw->oc", toward[half::2], x[half::2]) * norm[:, None]
        torch.testing.assert_close(statistics.sums["candidates"][half, 0, :, :, 4], own)


def test_combinations_of_outputs_keep_inner_products_in_the_mean() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv2d(2, 4000, 1, bias=False)
    statistics = GradientStatistics(layer)
    with torch.no_grad():
        layer.weight.fill_(0.5**0.5)
    a, b = torch.randn(2, 300, 4000, 1)
    b = b + a
    kept = statistics._sketch(a), statistics._sketch(b)
    assert kept[0].shape == (300, 32, 1)
    assert float((kept[0] * kept[1]).sum()) == pytest.approx(float((a * b).sum()), rel=0.1)


@pytest.mark.parametrize("size", [(9,), (5, 7), (3, 4, 2)])
def test_autocovariance_is_the_mean_of_products(size: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *size)
    got = autocovariance(x)
    assert got.shape == (3, *[2 * LAGS + 1] * len(size))
    for lag in itertools.product((-LAGS, -1, 0, 2), repeat=len(size)):
        total = torch.zeros(3)
        for pixel in itertools.product(*map(range, size)):
            other = [at + step for at, step in zip(pixel, lag, strict=True)]
            if all(0 <= at < length for at, length in zip(other, size, strict=True)):
                total += (x[(..., *pixel)] * x[(..., *other)]).mean(dim=0)
        wanted = total / x[0, 0].numel()
        place = (slice(None), *[step + LAGS for step in lag])
        torch.testing.assert_close(got[place], wanted, atol=1e-5, rtol=1e-5)


def test_covariances_of_shifted_copies_are_those_of_the_copies() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 60, 60)
    x = F.avg_pool2d(F.pad(x, [6] * 4), 3, 1, 1)  # neighbours alike, zeros around
    shifts = torch.tensor([[0.0, 0.0], [1.3, -0.4], [-1.5, 1.0], [0.25, 0.75]])
    copies = reroute(x, torch.zeros(4, dtype=torch.int64), shifts, torch.ones(4, dtype=torch.bool))
    measured = torch.einsum("ncyx,ndyx->cd", copies, copies) / (4 * 72 * 72)
    covariance = autocovariance(x).flatten(1).double()
    got = _covariances(covariance, shifts[None].double(), shifts[None].double())[0]
    torch.testing.assert_close(got, measured.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("whole")
def test_gain_is_what_least_squares_leaves() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv1d(2, 3, 1, bias=False)
    _open_slot(layer, 1, 0, [0.5])  # two slots read channel 0, none channel 1
    statistics = _watched(layer)
    x = torch.randn(8, 2, 400)
    x = F.pad(x[..., 6:-6], [6, 6])
    toward = torch.randn(8, 3, 400)
    (layer(x) * toward).sum().backward()
    got = _Search(_weigh(statistics), layer.gate, 0).gain
    norm = layer.weight.detach().flatten(1).norm(dim=1).double()
    mean = x.mean(dim=(0, 2)).double()
    sums = statistics.sums
    for place, offset in enumerate((-1.0, 0.0, 1.0)):
        shift = torch.tensor([[0.0], [0.5], [offset]])
        index, shifted = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
        copies = reroute(x, index, shift, shifted).double() - mean[0]
        covariance = torch.einsum("ncy,ndy->cd", copies, copies) / (8 * 400)
        within = covariance[:2, :2] + 1e-3 * covariance[0, 0] * torch.eye(2)
        share = torch.linalg.solve(within, covariance[:2, 2])
        novel = float(covariance[2, 2] - covariance[2, :2] @ share)
        numbers = []
        for half in (0, 1):
            grad = toward[half::2].double() * norm[:, None]
            a = torch.einsum("noy,ncy->oc", grad, copies[half::2])
            numbers.append(a[:, 2] - a[:, :2] @ share)
        wanted = float((numbers[0] * numbers[1]).sum()) / novel
        if novel > 0.05 * float(covariance[0, 0]):
            assert float(got[0, place]) == pytest.approx(wanted, rel=0.02)
        else:
            assert float(got[0, place]) == 0.0
    a = sums["candidates"][:, 0, :, 1].double()
    a = a - sums["outputs"][:, 0, :, None].double() * mean[1]
    variance = float((x[:, 1].double() - mean[1]).square().mean())
    wanted = (a[0] * a[1]).sum(dim=0) / variance
    torch.testing.assert_close(got[1], wanted, atol=1e-2, rtol=1e-2)


PLANTED = [
    {},
    {"kernel_size": 3, "padding": 1},
    {"groups": 2},
    {"stride": 2},
    {"axes": 1, "kernel_size": 3, "stride": 2, "padding": 1},
    {"axes": 3},
    {"batch": 1},
    {"channels_last": True},
    {"smooth": True},
]


@pytest.mark.parametrize("case", PLANTED, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_planted_channel_and_offset_are_found(seed: int, case: dict) -> None:
    """The target needs a channel at an offset that no slot reads."""
    options = {"kernel_size": 1, **case}
    axes, batch = options.pop("axes", 2), options.pop("batch", 16)
    is_last, is_smooth = options.pop("channels_last", False), options.pop("smooth", False)
    torch.manual_seed(seed)
    layer = CONVS[axes](8, 8, bias=False, **options)
    slot, source = int(torch.randint(8, ())), int(torch.randint(8, ()))
    places = list(itertools.product((-1, 0, 1), repeat=axes))
    places.remove((0,) * axes)
    offset = places[int(torch.randint(len(places), ()))]
    layer.gate[slot] = False
    statistics = _watched(layer)
    outputs = 8 // layer.groups
    group = slot // (8 // layer.groups)
    weight = torch.randn(outputs, 1, *layer.kernel_size)
    conv = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    for _ in range(12):
        x = torch.randn(batch, 8, *[6 if axes == 3 else 12] * axes)
        if is_smooth:
            x = (x + x.roll(1, -1) + x.roll(1, 2)) / 3**0.5
        if is_last:
            x = x.contiguous(memory_format=torch.channels_last)
        shift = torch.tensor([offset]).float()
        needed = reroute(x, torch.tensor([source]), shift, torch.tensor([True]))
        part = conv(needed, weight, stride=layer.stride, padding=layer.padding)
        out = layer(x)
        target = out.detach() + torch.randn_like(out)
        target[:, group * outputs : (group + 1) * outputs] += part
        (out - target).square().mean().backward()
    opened, sources, shifts, gains = choose_by_gradient(statistics, layer.gate, 32)
    assert (opened.tolist(), sources.tolist()) == ([slot], [source])
    assert shifts.tolist() == [list(map(float, offset))]
    assert gains.shape == (layer.groups, 8, 3**axes)


def test_noise_opens_less_than_a_planted_problem() -> None:
    """Gains without a cause are negative half of the time, and far below those with one."""
    torch.manual_seed(0)
    layer = sc.SelectConv2d(8, 8, 1, bias=False)
    statistics = _watched(layer)
    for _ in range(12):
        out = layer(torch.randn(16, 8, 12, 12))
        (out * torch.randn_like(out)).mean().backward()
    gains = _Search(_weigh(statistics), layer.gate, 0).gain
    gains = gains[gains != 0]
    assert 0.3 < float((gains > 0).double().mean()) < 0.7


def test_max_copies_ends_a_channel() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv2d(6, 4, 1, bias=False)
    layer.gate[1:5] = False
    statistics = _watched(layer)
    for _ in range(4):
        x = torch.randn(16, 6, 8, 8)
        out = layer(x)
        target = sum(x[:, 5:].roll(step, -1) for step in (-1, 1)) + x[:, 5:].roll(1, -2)
        (out - out.detach() - target).square().mean().backward()
    every = choose_by_gradient(statistics, layer.gate, None)[1]
    assert int((every == 5).sum()) >= 3
    capped = choose_by_gradient(statistics, layer.gate, 1)[1]
    assert int((capped == 5).sum()) == 1  # one reads it already, and may have one copy beside it
    layer.index[0] = 5
    assert not (choose_by_gradient(statistics, layer.gate, 1)[1] == 5).any()


def test_max_copies_counts_the_slots_of_all_groups() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv2d(6, 4, 1, groups=2, bias=False)
    layer.gate[[0, 1, 4, 5]] = False
    statistics = _watched(layer)
    for _ in range(4):
        x = torch.randn(16, 6, 8, 8)
        out = layer(x)
        (out - out.detach() - x[:, 2:3].roll(1, -1)).square().mean().backward()
    assert int((choose_by_gradient(statistics, layer.gate, None)[1] == 2).sum()) == 2
    assert int((choose_by_gradient(statistics, layer.gate, 1)[1] == 2).sum()) == 1


def test_nothing_watched_opens_nothing() -> None:
    layer = sc.SelectConv2d(6, 4, 1)
    layer.gate[1] = False
    opened, sources, shifts, gains = choose_by_gradient(_watched(layer), layer.gate, None)
    assert (len(opened), len(sources), shifts.shape, gains.shape) == (0, 0, (0, 2), (0, 6, 9))


def test_without_shifts_only_offset_zero_is_a_candidate() -> None:
    layer = sc.SelectConv1d(2, 2, 1)
    assert GradientStatistics(layer, use_shift=False).offsets.tolist() == [[0.0]]


@pytest.mark.parametrize("reason", ["eval", "no_grad", "over", "not due", "infinite"])
def test_passes_that_are_not_watched(reason: str) -> None:
    layer = sc.SelectConv2d(3, 4, 1)
    statistics = _watched(layer)
    x = torch.randn(2, 3, 5, 5)
    layer.train(reason != "eval")
    statistics.schedule.is_over = reason == "over"
    if reason == "not due":
        statistics.schedule.every, statistics.schedule.phase = 5, 1
    with torch.set_grad_enabled(reason != "no_grad"):
        out = layer(x).sum() * (float("inf") if reason == "infinite" else 1.0)
    if reason != "no_grad":
        out.backward()
    assert statistics.passes == 0


def test_copies_and_saved_models_are_not_watched() -> None:
    layer = sc.SelectConv2d(3, 4, 1)
    _watched(layer)
    assert copy.deepcopy(layer).statistics is None
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).statistics is None


def test_short_and_long_epochs_are_watched_about_thirty_times() -> None:
    layer = sc.SelectConv2d(3, 4, 1)
    statistics = GradientStatistics(layer)
    layer.statistics = statistics
    x = torch.randn(1, 3, 2, 2)
    for length in (3, 100, 400):
        for _ in range(2):
            statistics.restart()
            for _ in range(length):
                layer(x).sum().backward()
        assert min(length, 32) <= statistics.passes <= 40


def _train(allocator: sc.ChannelAllocator, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, optimizer = allocator.model, allocator.optimizer
    for _ in range(steps):
        x = torch.randn(8, 3, 16, 16, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _allocator(seed: int = 0, **options: object) -> sc.ChannelAllocator:
    torch.manual_seed(seed)
    model = sc.create_model(
        "densenet40", selective=True, growth_rate=4, units=[2, 2], num_classes=10
    )
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, momentum=0.9, weight_decay=1e-3)
    settings = {"total_epochs": 8, "gamma": 0.1, "growth": "gradient", **options}
    return sc.ChannelAllocator(model, optimizer, **settings)


def test_step_before_any_backward_pass_is_refused() -> None:
    allocator = _allocator()
    with pytest.raises(AllocationError, match="no backward pass since the last step"):
        allocator.step(0)
    assert not allocator.preview().reallocated  # what would be closed is known


def test_layer_that_nobody_watches_says_so() -> None:
    layer = sc.SelectConv2d(4, 4, 1)
    layer.mean_source = sc.BatchNormMean(nn.BatchNorm2d(4), torch.relu)
    layer.close([1])
    rule = sc.core.allocation.ReallocRule(growth="gradient")
    with pytest.raises(AllocationError, match="use a ChannelAllocator"):
        layer.plan(rule=rule)


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="`growth` must be one of importance, gradient"):
        _allocator(growth="loss")


def test_steps_move_slots_until_the_last_that_acts() -> None:
    allocator = _allocator()
    for epoch in range(8):
        _train(allocator, 10, seed=epoch)
        report = allocator.step(epoch)
        assert bool(report.reallocated) == (epoch < 4)
        watched = [layer.statistics for layer in allocator.layers.values()]
        assert all(statistics.schedule.is_over == (epoch >= 3) for statistics in watched)
    for name, plan in allocator.preview().plan:
        assert plan.gains is None, name


def test_opened_slots_read_whole_offsets_of_the_chosen_channels() -> None:
    allocator = _allocator()
    _train(allocator, 10)
    report = allocator.step(0)
    moved = 0
    for name, plan in report.plan:
        layer = allocator.layers[name]
        if layer.shift is None or not len(plan.opened):
            continue
        moved += len(plan.opened)
        assert layer.index[plan.opened].tolist() == plan.source.tolist()
        assert layer.shift[plan.opened].abs().max() <= 1
        assert not layer.weight[:, plan.opened].any()
        assert plan.gains.shape == (1, layer.in_channels, 9)
    assert moved > 0


def test_watching_changes_nothing_in_training() -> None:
    """The zoo's fused blocks included: an allocation is there before the comparison."""
    states = []
    for growth in ("importance", "gradient"):
        torch.manual_seed(0)
        allocator = _allocator(growth="importance")
        allocator.step(0)
        again = sc.ChannelAllocator(
            allocator.model, allocator.optimizer, total_epochs=8, growth=growth
        )
        _train(again, 3)
        states.append(again.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.usefixtures("whole")
def test_fused_blocks_are_watched_as_plain_ones_are() -> None:
    sums = []
    for fused in (True, False):
        allocator = _allocator()
        _train(allocator, 10)
        allocator.step(0)
        for layer in allocator.layers.values():
            layer.statistics.schedule.every = 1
            if not fused:  # a hook makes the block step aside
                layer.register_forward_hook(lambda *_: None)
        _train(allocator, 2, seed=1)
        sums.append({name: s.statistics.sums for name, s in allocator.layers.items()})
    for name, fused_sums in sums[0].items():
        for key, value in fused_sums.items():
            torch.testing.assert_close(value, sums[1][name][key], atol=1e-4, rtol=1e-3)


def test_resuming_in_the_middle_of_an_epoch_is_bit_equal() -> None:
    one = _allocator()
    _train(one, 10)
    one.step(0)
    _train(one, 5, seed=1)
    other = _allocator(seed=7)
    other.model.load_state_dict(one.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for allocator in (one, other):
        _train(allocator, 5, seed=2)
    assert one.step(1).to_dict() == other.step(1).to_dict()
    for allocator in (one, other):
        _train(allocator, 5, seed=3)
    assert one.step(2).to_dict() == other.step(2).to_dict()


@pytest.mark.parametrize("missing", ["a layer's schedule", "all", "a sum", "half of a sum"])
def test_damaged_statistics_are_refused_and_change_nothing(missing: str) -> None:
    allocator, other = _allocator(), _allocator()
    _train(other, 5, seed=1)
    state, before = other.state_dict(), allocator.state_dict()
    if missing == "all":
        del state["growth"]
    elif missing == "a sum":
        del state["growth"][list(state["growth"])[-1]]["sums"]["mean"]
    elif missing == "half of a sum":
        sums = state["growth"][list(state["growth"])[-1]]["sums"]
        sums["candidates"] = sums["candidates"][..., :2]
    else:
        del state["growth"][list(state["growth"])[-1]]["every"]
    with pytest.raises(AllocationError, match="`state` is damaged"):
        allocator.load_state_dict(state)
    assert str(allocator.state_dict()) == str(before)


def test_a_later_allocator_of_the_paper_stops_the_watch() -> None:
    allocator = _allocator()
    sc.ChannelAllocator(allocator.model, allocator.optimizer, total_epochs=4)
    assert all(layer.statistics is None for layer in allocator.layers.values())


def test_compiled_model_gets_a_clear_line() -> None:
    allocator = _allocator()
    compiled = torch.compile(allocator.model, backend="eager")
    F.cross_entropy(compiled(torch.randn(4, 3, 16, 16)), torch.zeros(4).long()).backward()
    with pytest.raises(AllocationError, match="Compiled models cannot be watched"):
        allocator.step(0)


def test_autocast_is_watched_in_full_precision() -> None:
    torch.manual_seed(0)
    layer = sc.SelectConv2d(4, 4, 1)
    statistics = _watched(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(4, 4, 6, 6)).float().square().mean().backward()
    assert statistics.passes == 1
    assert all(value.dtype == torch.float32 for value in statistics.sums.values())


def test_on_demand_growth_uses_what_was_seen_so_far() -> None:
    allocator = _allocator(gamma=0.2)
    _train(allocator, 10)
    closed = allocator.dealloc().deallocated
    opened = allocator.realloc().reallocated
    assert closed
    assert opened
    assert set(opened) <= set(closed)


def test_on_demand_growth_after_the_last_step_watches_again() -> None:
    allocator = _allocator(gamma=0.2, total_epochs=2)
    _train(allocator, 10)
    allocator.step(0)
    _train(allocator, 10)
    next(iter(allocator.layers.values())).close([0, 1])
    with pytest.raises(AllocationError, match="train the model"):
        allocator.realloc()
    _train(allocator, 10)
    assert allocator.realloc().reallocated


def test_layers_that_select_before_a_norm_are_refused() -> None:
    model = sc.create_model("densenet40", selective=True, units=[1, 1], placement="before-norm")
    with pytest.raises(AllocationError, match="placement='before-norm'"):
        sc.ChannelAllocator(model, total_epochs=4, growth="gradient")


def test_passes_without_gradients_use_up_no_turns() -> None:
    layer = sc.SelectConv2d(6, 4, 1)
    statistics = _watched(layer)
    x = torch.randn(2, 6, 8, 8)
    for _ in range(100):  # as a reentrant checkpoint does
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    alone = _watched(layer)
    for _ in range(100):
        layer(x).sum().backward()
    assert statistics.passes == alone.passes > 0


def test_the_default_device_may_be_another() -> None:
    allocator = _allocator(gamma=0.2)
    _train(allocator, 10)
    with torch.device("meta"):
        assert allocator.step(0).reallocated
