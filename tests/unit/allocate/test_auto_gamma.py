"""`gamma="auto"`: a share of the slots for each step, and the gamma that closes it."""

import pytest
import torch

import selectconv as sc
from selectconv.allocate.decision import (
    CLOSE_ONLY,
    CLOSED_SHARE,
    MOST,
    SHARE,
    first_epoch,
    share_of_slots,
    solve_gammas,
)
from selectconv.allocate.settings import Settings


@pytest.mark.parametrize(("epochs", "stop_at"), [(1, 0.5), (4, 0.5), (40, 0.5), (300, 0.3)])
@pytest.mark.parametrize("reopens", [True, False])
def test_shares_fall_and_sum_up(epochs: int, stop_at: float, reopens: bool) -> None:
    mode = "select" if reopens else "dealloc"
    settings = Settings(epochs, gamma="auto", stop_at=stop_at, mode=mode)
    shares = [share_of_slots(settings, epoch) for epoch in range(epochs)]
    assert sum(shares) == pytest.approx(SHARE if reopens else CLOSED_SHARE)
    acting = [share for share in shares if share > 0]
    assert acting == sorted(acting, reverse=True)
    assert not any(shares[epoch] for epoch in range(epochs) if epoch >= stop_at * epochs)
    assert shares.index(acting[0]) == min(int(0.05 * epochs), settings.num_steps - 1)


def test_grace_follows_from_the_length() -> None:
    assert [Settings(epochs, gamma="auto").grace for epochs in (1, 10, 40)] == [1, 1, 4]
    assert Settings(40, gamma="auto", grace=9).grace == 9


def _model(**options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = sc.create_model(
        "densenet40", selective=True, growth_rate=8, units=[2, 2], num_classes=10, **options
    )
    for module in model.modules():  # nothing has faded in a fresh model: let a part of it
        if hasattr(module, "gate"):
            with torch.no_grad():
                module.weight[:, ::2] *= 1e-3
    return model


def test_steps_close_the_share() -> None:
    model = _model()
    allocator = sc.ChannelAllocator(model, total_epochs=20, gamma="auto", seed=1)
    slots = sum(m.in_channels for m in allocator.layers.values() if m.shift is not None)
    total = 0
    for epoch in range(4):
        report = allocator.step(epoch)
        closed = sum(
            len(plan.closed)
            for name, plan in report.plan
            if allocator.layers[name].shift is not None
        )
        assert closed == pytest.approx(share_of_slots(allocator.settings, epoch) * slots, abs=1.0)
        total += closed
    assert total > 0


def test_gamma_has_a_limit() -> None:
    torch.manual_seed(0)
    model = sc.create_model("densenet40", selective=True, growth_rate=8, units=[2, 2])
    assert not sc.ChannelAllocator(model, total_epochs=2, gamma="auto").step(0)  # nothing has faded
    allocator = sc.ChannelAllocator(model, total_epochs=2, gamma="auto")
    for layer in allocator.layers.values():
        with torch.no_grad():
            layer.weight *= torch.linspace(0.01, 1, layer.in_channels)[:, None, None]
    gammas = solve_gammas(allocator.settings, allocator.layers, 0, {})
    most = {name: MOST / layer.in_channels for name, layer in allocator.layers.items()}
    # A share of 0.6 at once would need more.
    assert any(gammas[name] == most[name] for name in gammas)
    necdm = {name: layer.ecdm(normalized=True) for name, layer in allocator.layers.items()}
    plans = allocator.step(0).plan
    assert plans
    for name, plan in plans:
        assert float(necdm[name][plan.closed].sum(dim=0).max()) <= most[name] + 1e-6


def test_layers_that_never_reopen_keep_the_papers_gamma() -> None:
    model = _model()
    allocator = sc.ChannelAllocator(model, total_epochs=20, gamma="auto")
    gammas = solve_gammas(allocator.settings, allocator.layers, 5, {})
    for name, layer in allocator.layers.items():
        assert (gammas[name] == CLOSE_ONLY) == (layer.shift is None)
    only = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc")
    assert len(set(solve_gammas(only.settings, only.layers, 5, {}).values())) == 1


@pytest.mark.parametrize("last_epoch", [-1, 19])
def test_on_demand_it_closes_as_much_as_the_first_step(last_epoch: int) -> None:
    allocator = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc")
    first = first_epoch(allocator.settings)
    wanted = sc.ChannelAllocator(_model(), total_epochs=20, gamma="auto", mode="dealloc").step(
        first
    )
    allocator.load_state_dict(allocator.state_dict() | {"last_epoch": last_epoch})
    assert wanted.deallocated
    assert "gamma='auto'" in repr(allocator)
    assert allocator.dealloc().deallocated == wanted.deallocated
