"""Models, data and comparisons that the tests of the allocator and of training share."""

import copy
from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selectconv as sc
from selectconv.core.layer import SelectConvNd

CLASSES = 4
BUFFERS = ("gate", "index", "moved", "shifted")


BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Net(nn.Module):
    """Modules by name, and a function of the net and its input as forward."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)


def conv_net(width: int = 12, *, convert: bool = True) -> nn.Sequential:
    """conv-bn-relu-selectconv, twice: `conv1` is 1x1, `conv2` is 3x3; both re-allocate."""
    layers = OrderedDict(
        stem=nn.Conv2d(3, width, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(width),
        relu1=nn.ReLU(),
        conv1=nn.Conv2d(width, width, 1, bias=False),
        norm2=nn.BatchNorm2d(width),
        relu2=nn.ReLU(),
        conv2=nn.Conv2d(width, width, 3, padding=1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(width, CLASSES),
    )
    model = nn.Sequential(layers)
    if convert:
        sc.convert(model, torch.zeros(1, 3, 8, 8))
    return model


def plain_net(num_classes: int, in_channels: int) -> nn.Module:
    """`conv_net` before its conversion, as `--model tiny_models:plain_net` calls it."""
    assert in_channels == 3
    model = conv_net(convert=False)
    model.head = nn.Linear(model.head.in_features, num_classes)
    return model


def dense_net() -> nn.Module:
    """A DenseNet of three units; its 1x1 convs re-allocate, its 3x3 convs only close slots."""
    return sc.create_model(
        "densenet40", growth_rate=4, units=(1, 1, 1), selective=True, num_classes=CLASSES
    )


def select_layers(model: nn.Module) -> dict[str, SelectConvNd]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SelectConvNd)}


def shifted_net() -> nn.Sequential:
    """`conv_net` with drawn shifts."""
    model = conv_net()
    for layer in select_layers(model).values():
        nn.init.uniform_(layer.shift, -1.5, 1.5)
    return model


def decay(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    """Step without gradients, so that nothing acts but weight decay; return what is left."""
    before = {name: p.detach().abs().mean().item() for name, p in model.named_parameters()}
    for _ in range(50):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {
        name: parameter.detach().abs().mean().item() / before[name]
        for name, parameter in model.named_parameters()
        if before[name] > 0
    }


def silence(model: nn.Module, fraction: float = 0.25) -> dict[str, list[int]]:
    """Scale the weights of a fraction of each layer's slots by 1e-9; return which, by layer.

    Slots that are alone in their group are left as they are.
    """
    silent = {}
    for name, layer in select_layers(model).items():
        width = layer.in_channels // layer.groups
        slots = torch.arange(1, layer.in_channels if width > 1 else 1, round(1 / fraction))
        with torch.no_grad():
            weight = layer.weight.view(layer.groups, -1, *layer.weight.shape[1:])
            weight[slots // width, :, slots % width] *= 1e-9
        silent[name] = slots.tolist()
    return silent


def weights_of(layer: SelectConvNd, slots: list[int]) -> Tensor:
    """The weights (O, slots, ...) of some slots of an ungrouped layer, as a copy."""
    return layer.weight.detach()[:, slots]


def allocation_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers of every selective layer, by their names in the model."""
    return {
        f"{name}.{buffer}": getattr(layer, buffer).clone()
        for name, layer in select_layers(model).items()
        for buffer in BUFFERS
    }


def images(count: int = 16, *, seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """A synthetic task: noisy copies of one fixed pattern per class, and the classes."""
    patterns = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return patterns[labels] + 0.5 * noise, labels


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, *, seed: int = 0, **shape
) -> float:
    """Take real optimizer steps on fresh batches; the gradients of the last one stay in place."""
    model.train()
    loss = torch.zeros(())
    for step in range(steps):
        x, labels = images(seed=1000 * seed + step, **shape)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def outputs(model: nn.Module, x: Tensor | None = None) -> Tensor:
    """What the model computes in evaluation mode; its mode is put back."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        y: Tensor = model(images()[0] if x is None else x)
    model.train(was_training)
    return y


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    allocator: sc.ChannelAllocator | None = None,
) -> dict[str, object]:
    """Copy all that a call could change: states, pending gradients, global random numbers."""
    state = {
        "model": dict(model.state_dict()),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "allocator": None if allocator is None else allocator.state_dict(),
        "random": torch.get_rng_state(),
    }
    return copy.deepcopy(state)


def assert_same(got: object, expected: object, where: str = "") -> None:
    """Compare nested dicts and lists; tensors must agree bit by bit, NaN and -0.0 included."""
    assert type(got) is type(expected), f"{where}: {type(got)} and {type(expected)}"
    if isinstance(got, Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        differing = (_bits(got) != _bits(expected)).sum()
        assert differing == 0, f"{where}: {differing} bytes differ"
    elif isinstance(got, Mapping):
        assert list(got) == list(expected), where
        for key in got:
            assert_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(got, list | tuple):
        assert len(got) == len(expected), where
        for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(ours, theirs, f"{where}[{number}]")
    else:
        assert got == expected, f"{where}: {got!r} and {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
