"""Networks drawn at random from the parts that CNNs are made of, in 1, 2 and 3 dimensions."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

CLASSES = 5
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGE_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU, nn.ReLU, lambda: nn.ReLU(inplace=True), nn.ReLU6, nn.SiLU, nn.GELU,
    nn.Hardswish, nn.Mish, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Identity,
    lambda: nn.LeakyReLU(0.1), nn.PReLU,
)  # fmt: skip
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu, F.relu, F.silu, F.hardswish, lambda x: x.relu(), torch.sigmoid, F.gelu,
)  # fmt: skip


def sum_of_squares(values: Any) -> Tensor:
    """Return a loss for any kind of output."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return torch.stack([value.float().square().mean() for value in tensors]).sum()


class Block(nn.Module):
    """Modules by name, and a function of the block and its input as forward."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        """Compute the block."""
        return self.run(self, x)


class Builder:
    """Draws a network, block by block, and keeps track of its width and of the size of its maps.

    Args:
        draw: random numbers.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.dims = draw.choices((1, 2, 3), (2, 10, 1))[0]
        self.size = {1: 32, 2: 16, 3: 8}[self.dims]
        self.inputs = draw.choice((1, 3, 4))
        self.used: list[str] = []

    def network(self) -> tuple[nn.Module, Tensor]:
        """Return a network that can be trained, its norms' statistics filled, and a batch for it.

        There are no gradients where a sum is written into what a sigmoid needs again.
        """
        while True:
            self.used.clear()
            model, x = self._network()
            try:
                sum_of_squares(model.train()(x)).backward()
            except RuntimeError:
                continue
            model.zero_grad()
            return model, x

    def _network(self) -> tuple[nn.Module, Tensor]:
        draw, channels = self.draw, self.draw.choice((8, 12, 16, 24))
        shape = [self.size + draw.choice((0, 0, 1, 3)) for _ in range(self.dims)]
        blocks: list[nn.Module] = [CONVS[self.dims](self.inputs, channels, 3, padding=1)]
        for _ in range(draw.randint(2, 5)):
            name = draw.choice(list(BLOCKS))
            self.used.append(name)
            block, channels = BLOCKS[name](self, channels)
            blocks.append(block)
        body, head = nn.Sequential(*blocks), self.head(channels)
        x = torch.randn(draw.choice((2, 3, 4)), self.inputs, *shape)
        return draw.choice((nn.Sequential, _Named))(body, head), x

    def head(self, channels: int) -> nn.Module:
        """Draw what ends a network: a classifier, or a map for segmentation."""
        axes = tuple(range(2, 2 + self.dims))
        pool: Any = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
        norm, last = NORMS[self.dims](channels), nn.Linear(channels, CLASSES)
        return self.draw.choice((
            nn.Sequential(pool[self.dims](1), nn.Flatten(), last),
            Block(lambda own, x: own.last(own.norm(x).relu().mean(axes)), norm=norm, last=last),
            Block(lambda own, x: own.last(F.dropout(x.mean(axes), 0.1, own.training)), last=last),
            Block(lambda own, x: own.last(x).mean(axes), last=self.conv(channels, CLASSES, 1)),
            Block(
                lambda own, x: (own.last(torch.flatten(own.pool(x), 1)), x.amax(axes)),
                pool=pool[self.dims](1), last=last,
            ),
        ))  # fmt: skip

    def conv(self, inputs: int, outputs: int, kernel: int | None = None, **more: Any) -> nn.Module:
        """Draw a conv that keeps the size of its maps."""
        kernel = kernel or self.draw.choice((1, 1, 3, 3, 5))
        dilation = self.draw.choice((1, 1, 1, 2)) if kernel == 3 else 1
        mode = self.draw.choice(("zeros", "zeros", "zeros", "replicate", "circular"))
        groups = [g for g in (1, 1, 1, 2, 4) if inputs % g == 0 and outputs % g == 0]
        settings: dict[str, Any] = {
            "padding": dilation * (kernel // 2), "dilation": dilation, "padding_mode": mode,
            "bias": self.draw.random() < 0.5, "groups": self.draw.choice(groups), **more,
        }  # fmt: skip
        return CONVS[self.dims](inputs, outputs, kernel, **settings)

    def norm(self, channels: int) -> nn.Module:
        """Draw a norm: batch norm, mostly."""
        kinds: tuple[Callable[[], nn.Module], ...] = (
            *[lambda: NORMS[self.dims](channels)] * 6,
            lambda: nn.GroupNorm(2 if channels % 2 == 0 else 1, channels),
            lambda: NORMS[self.dims](channels, affine=False),
            nn.Identity,
        )
        return self.draw.choice(kinds)()

    def act(self) -> nn.Module:
        """Draw an activation: a module, or a function in a module."""
        if self.draw.random() < 0.2:
            function = self.draw.choice(FUNCTIONS)
            return Block(lambda own, x: function(x))
        return self.draw.choice(ACTIVATIONS)()

    def unit(self, inputs: int, outputs: int, kernel: int | None = None, **more: Any) -> nn.Module:
        """Draw a conv with its norm and activation, in either order."""
        conv = self.conv(inputs, outputs, kernel, **more)
        if self.draw.random() < 0.5:
            return nn.Sequential(conv, self.norm(outputs), self.act())
        norm = NORMS[self.dims](inputs)  # an activation in place must not write into what came
        return nn.Sequential(norm, self.act(), conv)

    def body(self, inputs: int, outputs: int) -> nn.Module:
        """Draw one or two units."""
        if self.draw.random() < 0.5:
            return self.unit(inputs, outputs)
        middle = self.draw.choice((8, 16))
        return nn.Sequential(self.unit(inputs, middle), self.unit(middle, outputs))


class _Named(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, image: Tensor) -> Any:
        return self.head(self.body(image))


Made = tuple[nn.Module, int]


def plain(own: Builder, c: int) -> Made:
    """Draw one or two units of another width."""
    width = own.draw.choice((8, 12, 16, 20))
    return own.body(c, width), width


def residual(own: Builder, c: int) -> Made:
    """Draw a residual block; its sum may be written in place."""

    def in_place(own: Any, x: Tensor) -> Tensor:
        y = own.body(x)
        y += own.skip(x)
        return own.act(y)

    skip = own.draw.choice((nn.Identity, lambda: own.conv(c, c, 1)))()
    run = own.draw.choice((in_place, lambda own, x: own.act(own.body(x) + own.skip(x))))
    return Block(run, body=own.body(c, c), skip=skip, act=nn.ReLU()), c


def dense(own: Builder, c: int) -> Made:
    """Draw a block whose input is concatenated to its output."""
    grown = own.draw.choice((4, 8))
    return Block(lambda own, x: torch.cat([x, own.body(x)], 1), body=own.body(c, grown)), c + grown


def branches(own: Builder, c: int) -> Made:
    """Draw an inception block."""
    widths = [own.draw.choice((4, 8, 12)) for _ in range(own.draw.choice((2, 3)))]
    parts = nn.ModuleList(own.body(c, width) for width in widths)
    return Block(lambda own, x: torch.cat([p(x) for p in own.parts], dim=1), parts=parts), sum(
        widths
    )


def squeeze(own: Builder, c: int) -> Made:
    """Draw a squeeze-excite block."""
    axes = tuple(range(2, 2 + own.dims))
    down, up = CONVS[own.dims](c, 8, 1), CONVS[own.dims](8, c, 1)

    def run(own: Any, x: Tensor) -> Tensor:
        x = own.body(x)
        return x * own.up(own.down(x.mean(axes, keepdim=True)).relu()).sigmoid()

    return Block(run, body=own.unit(c, c), down=down, up=up), c


def depthwise(own: Builder, c: int) -> Made:
    """Draw an inverted residual: 1x1, depthwise, 1x1."""
    wide, kernel = 2 * c, own.draw.choice((3, 5))
    deep = own.conv(wide, wide, kernel, groups=wide)
    parts = (own.conv(c, wide, 1, groups=1), own.norm(wide), own.act(), deep, own.norm(wide),
             own.act(), own.conv(wide, c, 1, groups=1), own.norm(c))  # fmt: skip
    return Block(lambda own, x: x + own.body(x), body=nn.Sequential(*parts)), c


def shuffle(own: Builder, c: int) -> Made:
    """Draw a ShuffleNet block: half the channels pass by, then all are shuffled."""
    if c % 4:
        return plain(own, c)

    def run(own: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, own.body(right)], dim=1)
        n, width, *size = x.shape
        return x.view(n, 2, width // 2, *size).transpose(1, 2).reshape(n, width, *size)

    return Block(run, body=own.body(c // 2, c // 2)), c


def ghost(own: Builder, c: int) -> Made:
    """Draw a ghost block: some channels, cheap copies of them, and a slice of both."""
    primary, cheap = own.unit(c, 8), own.conv(8, 8, 3, groups=8)

    def run(own: Any, x: Tensor) -> Tensor:
        y = own.primary(x)
        return torch.cat([y, own.cheap(y)], dim=1)[:, :12]

    return Block(run, primary=primary, cheap=cheap), 12


def smaller(own: Builder, c: int) -> Made:
    """Draw a block that halves the maps."""
    if own.size < 8:
        return plain(own, c)
    own.size //= 2
    pool = own.draw.choice((
        lambda: MAX_POOLS[own.dims](2), lambda: MAX_POOLS[own.dims](3, 2, 1),
        lambda: AVERAGE_POOLS[own.dims](2), lambda: own.conv(c, c, 3, stride=2),
    ))()  # fmt: skip
    return nn.Sequential(own.unit(c, c), pool), c


def u_shape(own: Builder, c: int) -> Made:
    """Draw a U: down, up again, and a skip connection."""
    pool = AVERAGE_POOLS[own.dims](2, ceil_mode=True)

    def run(own: Any, x: Tensor) -> Tensor:
        y = F.interpolate(own.body(own.pool(x)), size=x.shape[2:])
        return torch.cat([y, x], dim=1)

    return Block(run, pool=pool, body=own.body(c, 8)), c + 8


def shared(own: Builder, c: int) -> Made:
    """Draw a conv that is used twice, with norms of its own each time."""
    first, second = NORMS[own.dims](c), NORMS[own.dims](c)

    def run(own: Any, x: Tensor) -> Tensor:
        return own.conv(own.second(own.conv(own.first(x).relu())).relu())

    return Block(run, first=first, second=second, conv=own.conv(c, c)), c


def padded(own: Builder, c: int) -> Made:
    """Draw a residual block that pads its shortcut with zero channels."""
    frame = [0] * 2 * own.dims + [2, 6]

    def run(own: Any, x: Tensor) -> Tensor:
        return own.body(x) + F.pad(x, frame)

    return Block(run, body=own.body(c, c + 8)), c + 8


def channels_last(own: Builder, c: int) -> Made:
    """Draw a ConvNeXt block: layer norm and linear layers on permuted channels."""
    there = (0, *range(2, 2 + own.dims), 1)
    back = (0, 1 + own.dims, *range(1, 1 + own.dims))

    def run(own: Any, x: Tensor) -> Tensor:
        y = own.norm(own.deep(x).permute(*there))
        return x + own.down(F.gelu(own.up(y))).permute(back) * 0.5

    return Block(
        run, deep=own.conv(c, c, 3, groups=c), norm=nn.LayerNorm(c), up=nn.Linear(c, 16),
        down=nn.Linear(16, c),
    ), c  # fmt: skip


def scaled(own: Builder, c: int) -> Made:
    """Draw a block with a learned scale for each channel."""

    class Scaled(nn.Module):
        def __init__(self, body: nn.Module, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.body, self.scale = body, nn.Parameter(torch.rand(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x) * self.scale

    shape = (c, *[1] * own.dims)
    return Scaled(own.body(c, c), own.draw.choice((shape, (1, *shape)))), c


def dropped(own: Builder, c: int) -> Made:
    """Draw a unit with dropout."""
    return nn.Sequential(own.unit(c, c), nn.Dropout(0.1), own.unit(c, c)), c


BLOCKS: dict[str, Callable[[Builder, int], Made]] = {
    function.__name__: function
    for function in (
        plain, residual, dense, branches, squeeze, depthwise, shuffle, ghost, smaller, u_shape,
        shared, padded, channels_last, scaled, dropped,
    )
}  # fmt: skip
