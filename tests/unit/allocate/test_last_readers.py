"""Which slots `gamma="auto"` leaves open so that every channel has a reader."""

import pytest
import torch
from torch import nn

import selectconv as sc

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Fork(nn.Module):
    """Two 1x1 convs, `left` and `right`, read the stem; `last` alone reads what they make."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)
        self.norm = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.last(self.norm(torch.cat([self.left(x), self.right(x)], 1)))


def make(**settings):
    """Convert the fork, with slots that hardly matter: 0 and 1 of each conv, of `right` 1 alone."""
    model = sc.convert(Fork(), IMAGES)
    with torch.no_grad():
        for conv, slots in ((model.left, [0, 1]), (model.right, [1]), (model.last, [0, 1])):
            conv.weight[:, slots] *= 1e-4
    return model, sc.ChannelAllocator(model, total_epochs=2, gamma="auto", **settings)


def test_the_last_reader_of_a_channel_keeps_it():
    _, allocator = make(example_input=IMAGES)
    closed = allocator.preview().deallocated
    assert 0 in closed["left"]
    assert 0 not in closed.get("right", [])
    # Both can do without channel 1; the one that needs it more keeps it.
    assert sum(1 in closed.get(name, []) for name in ("left", "right")) == 1
    assert "last" not in closed


def test_without_an_example_nobody_is_asked_who_else_reads():
    _, allocator = make()
    closed = allocator.preview().deallocated
    assert {0, 1} <= set(closed["last"])
    assert 1 in closed["left"]
    assert 1 in closed["right"]


def test_a_copy_does_not_keep_a_channel_that_its_own_slot_reads():
    model, allocator = make(example_input=IMAGES)
    model.last.close([5])
    model.last.realloc(top_k=1, use_shift=False)  # its weights are zero
    source = int(model.last.index[5])
    assert source != 5
    assert allocator.preview().deallocated["last"] == [5]


def test_an_allocator_of_a_trained_model_decides_as_that_of_the_fresh_one():
    class Grouped(Fork):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Conv2d(16, 8, 1, groups=2) for _ in range(2))

    model = sc.convert(Grouped(), IMAGES).train()
    model(IMAGES)  # inputs are observed
    model.left.close([2])
    model.left.realloc()
    with torch.no_grad():
        model.last.weight[:, :2] *= 1e-6
    allocator = sc.ChannelAllocator(model, total_epochs=2, gamma="auto", example_input=IMAGES)
    assert "last" not in allocator.preview().deallocated


def test_layers_that_no_step_touches_go_on_reading():
    model, allocator = make(example_input=IMAGES)
    model.right.requires_grad_(False)
    assert {0, 1} <= set(allocator.preview().deallocated["left"])


def test_a_number_as_gamma_is_the_papers():
    model = sc.convert(Fork(), IMAGES)
    with torch.no_grad():
        model.last.weight[:, :2] *= 1e-6
    allocator = sc.ChannelAllocator(model, total_epochs=2, gamma=1e-3, example_input=IMAGES)
    assert {0, 1} <= set(allocator.preview().deallocated["last"])


def test_a_chain_in_which_auto_would_close_nothing_is_told():
    chain = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1),
    )  # fmt: skip
    model = sc.convert(chain, IMAGES)
    with pytest.warns(sc.SelectConvWarning, match="closes nothing"):
        allocator = sc.ChannelAllocator(model, total_epochs=2, gamma="auto", example_input=IMAGES)
    with torch.no_grad():
        model[3].weight[:, :4] *= 1e-6
    assert not allocator.preview()


def test_a_model_that_cannot_be_traced_is_told():
    class Branch(Fork):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else x * 2)

    model = sc.convert(Branch(), IMAGES)
    with pytest.warns(sc.SelectConvWarning, match="who else reads"):
        allocator = sc.ChannelAllocator(model, total_epochs=2, gamma="auto", example_input=IMAGES)
    assert allocator.settings.gamma == "auto"
    assert allocator.preview().unknown == ("left", "right", "last")  # it goes on without the rule
