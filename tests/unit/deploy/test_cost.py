"""Parameters and multiply-adds against numbers counted by hand."""

import pytest
import torch
from torch import Tensor, nn

import selectconv as sc
from selectconv.deploy.cost import count_macs, count_params
from tiny_models import assert_same, snapshot


class Twice(nn.Module):
    """Runs one conv twice, on a tensor that it makes itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.conv(torch.zeros(1, 4, 5, 5))


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (nn.Conv2d(3, 8, 3), 8 * 3 * 9 + 8),
        (nn.Conv2d(8, 6, 3, groups=2, bias=False), 6 * 4 * 9),
        (nn.BatchNorm2d(5), 10),
        (nn.Linear(7, 3), 24),
        (nn.ReLU(), 0),
        (nn.Sequential(*[nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)] * 2), 16),
        (sc.SelectConv2d(8, 4, 1, bias=False), 8 * 4 + 2 * 8),
        (sc.SelectConv2d(8, 4, 1, bias=False, reallocate=False), 8 * 4),
    ],
)
def test_params_by_hand(model, params):
    assert count_params(model) == params


@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (3, 10, 6), 10 * 6 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3), (3, 10, 6), 8 * 4 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 10, 6), 5 * 3 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, 3, dilation=2), (3, 10, 6), 6 * 2 * 8 * 3 * 9),
        (nn.Conv2d(8, 12, 3, padding=1, groups=4), (8, 5, 5), 5 * 5 * 12 * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 5, 5), 5 * 5 * 8 * 9),
        (nn.Conv1d(3, 8, 3), (3, 10), 8 * 8 * 3 * 3),
        (nn.Conv3d(2, 4, 1), (2, 3, 4, 5), 60 * 4 * 2),
        (nn.Linear(64, 10), (64,), 640),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2)), (3, 8, 8), 0),
        (nn.Conv2d(3, 8, 1, dtype=torch.float64), (3, 4, 4), 16 * 8 * 3),
        (Twice(), (4, 5, 5), 2 * 25 * 16),
        # In training, batch norm refuses a single value per channel.
        (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).train(), (3, 1, 1), 24),
    ],
)
def test_macs_by_hand(model, shape, macs):
    assert count_macs(model, shape) == macs


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)).train()
    before = snapshot(model)
    assert count_macs(model, (3, 5, 5)) == 9 * 8 * 3 * 9
    assert all(module.training for module in model.modules())
    assert_same(snapshot(model), before)


def test_works_without_memory():
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6, bias=False)
    assert count_macs(huge, (10**6,)) == 10**12


PAPER = {  # parameters, multiply-adds and CondenseNet's count of the zoo, from the architecture
    "densenet40": (211_978, 71_334_240, 72_494_698),
    "densenet100": (995_698, 286_439_280, 291_505_018),
    "resnet164": (1_661_274, 239_258_112, 242_412_042),
}


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("name", PAPER)
def test_count_of_the_zoo(name, selective):
    cost = sc.count(sc.create_model(name, selective=selective), torch.zeros(1, 3, 32, 32))
    assert (cost.params, cost.macs, cost.macs_cn) == PAPER[name]


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        sc.SelectConv2d(8, 6, 1, bias=False),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )


def test_closed_slots_and_what_only_they_read_are_not_counted():
    model, x = chain(), torch.zeros(1, 3, 6, 6)
    dense = sc.count(model, x)
    assert dense.params == 8 * 27 + 8 + 16 + 48 + 275 == count_params(model) - 16  # the shifts
    assert dense.macs == 36 * (8 * 27 + 48) + 270
    assert dense.macs_cn == dense.macs + 5 + 36 * 8 + 36 * 6
    model[3].close([1, 2, 5])
    closed = sc.count(model, x)
    assert closed.params == 5 * 27 + 5 + 10 + 30 + 275
    assert closed.macs == 36 * (5 * 27 + 30) + 270
    assert closed.macs_cn == closed.macs + 5 + 36 * 5 + 36 * 6
    assert sc.count(model, x.expand(4, -1, -1, -1)).macs == 4 * closed.macs


class Forked(nn.Module):
    """Joins its input with one that a transposed conv enlarges, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.joined = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(torch.cat([self.up(self.coarse(x)), self.fine(x)], dim=1))


def test_a_branch_that_nobody_reads_costs_nothing():
    model, x = Forked(), torch.randn(1, 3, 6, 6)
    sc.convert(model, x)
    assert sc.count(model, x).macs == 36 * (24 + 64) + 9 * (96 + 8 * 8 * 4)
    model.joined.close(range(8))  # all that the transposed conv writes
    small = sc.compress(model, x)
    assert not hasattr(small, "up")
    assert sc.count(model, x) == sc.count(small, x)
    assert sc.count(model, x).macs == 36 * (24 + 32)


def test_a_counter_follows_the_allocation():
    model, x = chain(), torch.zeros(1, 3, 6, 6)
    counter = sc.CostCounter(model, x)
    for slots in ([], [0], [3, 4]):
        model[3].close(slots)
        assert counter.count() == sc.count(model, x)
    assert counter.count().macs == 36 * (5 * 27 + 30) + 270


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        ("net", torch.zeros(1, 3, 4, 4), TypeError, "`model` must be an nn.Module, got str"),
        (nn.Conv2d(3, 4, 1), torch.zeros(1, 2, 4, 4), ValueError, "`example_input`: the model"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Branching())),
            torch.zeros(1, 3, 4, 4),
            ValueError,
            r"`1\.0` \(Branching\) cannot be traced: .*masked, still works",
        ),
        (Branching(), torch.zeros(1, 3), ValueError, "`Branching` cannot be traced"),
        (Twice(), {"y": torch.zeros(1)}, TypeError, "`example_input` does not fit.*'x'"),
    ],
)
def test_count_refuses(model, example, error, message):
    with pytest.raises(error, match=message):
        sc.count(model, example)
