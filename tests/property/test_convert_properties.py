"""Random small CNNs: `convert` changes no output, and what it made can be trained and allocated."""

import copy

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

import selectconv as sc
from selectconv.core.layer import SelectConvNd

WIDTH = 8  # every block takes and gives so many channels
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "hardswish": nn.Hardswish,
    "relu6": nn.ReLU6,
    "gelu": nn.GELU,
    "prelu": lambda: nn.PReLU(WIDTH),
    "none": nn.Identity,
}
NORMS = {
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "none": nn.Identity,
}
POOLS = {
    "average": lambda: nn.AvgPool2d(2, 1),
    "padded average": lambda: nn.AvgPool2d(3, 1, padding=1),
    "max": lambda: nn.MaxPool2d(3, 1, padding=1),
    "dropout": lambda: nn.Dropout(0.2),
    "dropout2d": lambda: nn.Dropout2d(0.2),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "shuffle": lambda: nn.ChannelShuffle(2),
}


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Branches(nn.Module):
    """Two bodies side by side, concatenated, and a conv on the result."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right
        self.join = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        return self.join(torch.cat([self.left(x), self.right(x)], dim=1).relu())


class Padded(nn.Module):
    """Half the channels of a conv, and zeros in place of the others."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH // 2, 1), nn.BatchNorm2d(WIDTH // 2)

    def forward(self, x):
        return nn.functional.pad(self.norm(self.conv(x)), (0, 0, 0, 0, 0, WIDTH // 2))


class Split(nn.Module):
    """Half the channels pass by, the others go through a body; then all are shuffled."""

    def __init__(self, norm, act):
        super().__init__()
        self.norm, self.act = norm, act
        self.body = nn.Sequential(nn.Conv2d(WIDTH // 2, WIDTH // 2, 1), nn.BatchNorm2d(WIDTH // 2))
        self.last = nn.Conv2d(WIDTH, WIDTH, 1, groups=2)

    def forward(self, x):
        left, right = self.act(self.norm(x)).chunk(2, dim=1)
        x = torch.cat([left, self.body(right)], dim=1)
        n, c, h, w = x.shape
        return self.last(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class SqueezeExcite(nn.Module):
    """Scales the channels by what their averages say."""

    def __init__(self):
        super().__init__()
        self.squeeze, self.expand = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x * self.expand(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


@st.composite
def units(draw, keeps_size=True):
    """Norm, activation, conv."""
    kernel = draw(st.sampled_from([1, 3]))
    conv = nn.Conv2d(
        WIDTH,
        WIDTH,
        kernel,
        padding=kernel // 2,
        stride=1 if keeps_size else draw(st.sampled_from([1, 2])),
        groups=draw(st.sampled_from([1, 2, 8])),
        bias=draw(st.booleans()),
    )
    norm, act = draw(st.sampled_from(sorted(NORMS))), draw(st.sampled_from(sorted(ACTIVATIONS)))
    if norm == "none" and act == "relu in place":  # would overwrite what the block's others read
        act = "relu"
    return nn.Sequential(NORMS[norm](), ACTIVATIONS[act](), conv)


@st.composite
def blocks(draw):
    kinds = ["unit", "residual", "branches", "shared", "pool", "padded", "split", "excite"]
    kind = draw(st.sampled_from(kinds))
    if kind == "unit":
        return draw(units(keeps_size=False))
    if kind == "residual":
        return Residual(draw(units()))
    if kind == "branches":
        return Branches(draw(units()), draw(units()))
    if kind == "shared":
        shared = draw(units())
        return nn.Sequential(shared, nn.BatchNorm2d(WIDTH), shared)
    if kind == "pool":
        return POOLS[draw(st.sampled_from(sorted(POOLS)))]()
    if kind == "split":
        norm, act = draw(st.sampled_from(sorted(NORMS))), draw(st.sampled_from(["relu", "silu"]))
        return Split(NORMS[norm](), ACTIVATIONS[act]())
    if kind == "excite":
        return SqueezeExcite()
    return Padded()


@st.composite
def networks(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    body = draw(st.lists(blocks(), min_size=1, max_size=4))
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        *body,
        nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, 4, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # trained ones are not all alike
            nn.init.normal_(module.weight, 1.0, 0.5)
            nn.init.normal_(module.bias, 0.0, 0.5)
    return model


@pytest.mark.timeout(300)  # 23 s of CPU; a busy machine takes several times as long
@settings(max_examples=max(200, settings.default.max_examples))
@given(
    model=networks(),
    has_example=st.booleans(),
    realloc=st.sampled_from(["all", "pointwise", "none"]),
)
def test_convert_then_train(model, has_example, realloc):
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 12, 9)
    sc.convert(model, x if has_example else None, realloc=realloc)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    model.train(), plain.train()
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for seed in range(2):
        outputs = []
        for net in (model, plain):
            torch.manual_seed(seed)
            outputs.append(net(x))
        assert torch.equal(*outputs)
    train_a_step(model, optimizer, x)
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=10, gamma=0.2)
    report = allocator.step(0)
    event(f"slots changed: {bool(report)}")
    layers = [layer for layer in model.modules() if isinstance(layer, SelectConvNd)]
    assert all(layer.gate.any() for layer in layers)
    assert sum(row.moved for row in sc.describe(model)) == sum(
        map(len, report.reallocated.values())
    )
    train_a_step(model, optimizer, x)
    assert model.eval()(x).isfinite().all()


def train_a_step(model, optimizer, x):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), torch.arange(4)).backward()
    missing = [name for name, value in model.named_parameters() if value.grad is None]
    assert missing == []
    optimizer.step()
