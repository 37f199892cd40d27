"""How far the assumptions behind ECDM hold: the distribution of hidden inputs (Figure 6)."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.lab.report.figures.allocation import describe, short_name
from selectconv.lab.report.figures.plots import COLOURS, GRID, INK, Figure, drawing, to_svg
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.report.runs.trained import Trained, watch_inputs

_PIXELS = 3
_CHANNELS = 3
_TONES = (COLOURS["dealloc"], COLOURS["select"], COLOURS["random"])


def draw_inputs(run: Run, trained: Trained, name: str) -> Figure:
    """Draw Figure 6: histograms of single pixels, and mean against deviation of all of them."""
    layer = middle_layer(trained.model)
    title = "Distribution of hidden inputs"
    if layer is None:
        return Figure(title, describe(run), problem="The network has no BN before a 1x1 conv.")
    values = watch_inputs(trained.model, layer, trained.images, before=True)
    # A fresh batch norm has seen nothing: it normalises by the statistics of these images.
    fresh = watch_inputs(copy.deepcopy(trained.fresh).train(), layer, trained.images, before=True)
    norm = trained.model.get_submodule(layer.rpartition(".")[0] + ".norm")
    assert isinstance(norm, nn.BatchNorm2d)
    generator = torch.Generator().manual_seed(run.config.seed)
    channels = torch.randperm(values.shape[1], generator=generator)[:_CHANNELS].tolist()
    height, width = values.shape[2:]
    inner = [
        (int(y) + 1, int(x) + 1)
        for y, x in torch.stack(
            [
                torch.randint(max(1, size - 2), (_PIXELS,), generator=generator)
                for size in (height, width)
            ]
        ).T.tolist()
    ]
    border = [(0, 0), (0, width // 2), (height // 2, width - 1)]
    with drawing() as plt:
        figure, axes = plt.subplots(1, 4, figsize=(11, 2.7))
        for panel, pixels, label in ((0, inner, "inner pixels"), (1, border, "boundary pixels")):
            _histograms(axes[panel], values[:, channels[0]], pixels)
            _normal_curve(axes[panel], norm, channels[0])
            axes[panel].set_title(f"{label}, channel {channels[0]}")
        for panel, data, label in ((2, fresh, "at the start"), (3, values, "trained")):
            _scatter(axes[panel], data, channels)
            axes[panel].set_title(label)
        axes[2].set_ylabel("std")
        figure.tight_layout()
        body = to_svg(figure, name)
    return Figure(
        title,
        f"{describe(run)}. The paper's Figure 6, for {short_name(layer)}: the output of its batch "
        f"norm over {len(values):,} test images, before ReLU. Left: {_PIXELS} pixels of a channel; "
        "dashed: the normal distribution with batch norm's parameters, as in Eq. (1). Right: "
        f"one point per pixel, {_CHANNELS} channels; crosses are boundary pixels. ECDM assumes a "
        "single point per channel.",
        body,
    )


def middle_layer(model: nn.Module) -> str | None:
    """Return the middle one of the first block's 1x1 convs that follow a batch norm."""
    modules = dict(model.named_modules())
    names = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and name.startswith("blocks.0.")
        and name.endswith(".conv")
        and isinstance(modules.get(name.removesuffix("conv") + "norm"), nn.BatchNorm2d)
    ]
    return names[len(names) // 2] if names else None


def _histograms(axes: Any, values: Tensor, pixels: list[tuple[int, int]]) -> None:
    for (y, x), tone in zip(pixels, _TONES, strict=True):
        axes.hist(
            values[:, y, x].numpy(), bins=30, density=True, histtype="step", color=tone,
            label=f"({y}, {x})",
        )  # fmt: skip
    axes.legend(fontsize=7, title="pixel", title_fontsize=7)
    axes.set_xlabel("value")


def _normal_curve(axes: Any, norm: nn.BatchNorm2d, channel: int) -> None:
    mean, std = float(norm.bias.detach()[channel]), abs(float(norm.weight.detach()[channel]))
    if std < 1e-6:
        return
    grid = torch.linspace(mean - 4 * std, mean + 4 * std, 200)
    density = torch.exp(-0.5 * ((grid - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    axes.plot(grid.tolist(), density.tolist(), color=INK, linestyle="--", linewidth=1)


def _scatter(axes: Any, values: Tensor, channels: list[int]) -> None:
    edge = torch.ones(values.shape[2:], dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    for channel, tone in zip(channels, _TONES, strict=False):
        mean, std = values[:, channel].mean(dim=0), values[:, channel].std(dim=0)
        axes.plot(mean[~edge].tolist(), std[~edge].tolist(), ".", color=tone, markersize=2.5,
                  label=f"channel {channel}")  # fmt: skip
        axes.plot(mean[edge].tolist(), std[edge].tolist(), "x", color=tone, markersize=4)
    axes.grid(color=GRID, linewidth=0.5)
    axes.legend(fontsize=7)
    axes.set_xlabel("mean")
