"""Figures of one run's trained network on test images: shifts, feature maps, hidden inputs.

Each function gets the run, its network and pyplot, and returns a figure with its caption.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.core.models import selective_layers
from selectconv.lab.data.image_set import ImageSet
from selectconv.lab.data.registry import load_dataset
from selectconv.lab.report.collect import Run
from selectconv.lab.report.figure import COLOURS, GRID, INK
from selectconv.lab.report.figures_of_slots import block_of, short_name
from selectconv.lab.report.replay import MOVED
from selectconv.lab.train.network import build_model, load_network

_RED, _GREEN = "#d9483b", "#2f9e5f"
_TONES = (COLOURS["dealloc"], COLOURS["select"], COLOURS["random"])
_NUM_IMAGES = 512  # for the histograms of hidden inputs
_SHOWN = 4  # images of which feature maps are drawn
_TOP = 5


@dataclass(frozen=True)
class Trained:
    """A run's network and images.

    Attributes:
        model: with the last weights, in evaluation mode.
        fresh: with the weights it began with, in training mode.
        images: float (N, C, H, W), normalised test images.
        pictures: uint8 (N, C, H, W), the same to look at.
    """

    model: nn.Module
    fresh: nn.Module
    images: Tensor
    pictures: Tensor


@lru_cache(maxsize=1)
def load_trained(run: Run) -> Trained:
    """Load a run's network and the first test images.

    Raises:
        SelectConvError, ValueError: its weights or images are missing or damaged.
    """
    config = run.config
    if run.weights is None:
        raise ValueError("it needs the run's last.safetensors, which was not kept.")
    splits = load_dataset(
        config.data,
        config.data_root,
        fetch=False,
        test_subset=config.test_subset,
        image_size=config.image_size,
    )
    if not isinstance(splits.test, ImageSet):
        raise ValueError("it is drawn for data sets of small images only.")
    torch.manual_seed(config.seed)
    fresh = build_model(config, splits.info)
    model = load_network(config, splits.info, run.weights)
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        raise ValueError(f"{run.weights.name} holds NaN or infinite values.")
    pictures = splits.test.images[:_NUM_IMAGES]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (splits.info.mean, splits.info.std))
    return Trained(model, fresh.train(), (pictures / 255 - mean) / std, pictures)


@torch.no_grad()
def watch(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a module's input and output for these images."""
    seen: list[tuple[Tensor, Tensor]] = []
    # Copied at once: activations work in place.
    hook = model.get_submodule(name).register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0].clone(), output.clone()))
    )
    try:
        model(images)
    finally:
        hook.remove()
    return seen[0]


def draw_shifts(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 8: the learned shifts of re-allocated slots in pixels, one plot per block."""
    trained = load_trained(run)
    blocks: dict[str, list[Tensor]] = {}
    for name, layer in selective_layers(trained.model).items():
        if layer.shift is not None and (layer.shifted & layer.gate).any():
            chosen = layer.shift.detach()[layer.shifted & layer.gate]
            blocks.setdefault(block_of(name), []).append(chosen)
    if not blocks:
        raise ValueError("no slot of this run is shifted.")
    points = {block: torch.cat(parts) for block, parts in sorted(blocks.items())}
    edge = max(2, *(int(shifts.abs().max() + 1) for shifts in points.values()))
    size = (2.7 * len(points), 2.9)
    figure, panels = plt.subplots(1, len(points), figsize=size, squeeze=False)
    for axes, (block, shifts) in zip(panels[0], points.items(), strict=True):
        for line in range(-edge, edge + 1):
            axes.axhline(line, color=GRID, linewidth=0.6)
            axes.axvline(line, color=GRID, linewidth=0.6)
        look = {"color": COLOURS[run.config.method], "markersize": 3, "alpha": 0.7}
        axes.plot(shifts[:, 1].tolist(), shifts[:, 0].tolist(), "o", **look)
        axes.set(xlim=(-edge, edge), ylim=(edge, -edge), aspect="equal", xlabel="columns")
        axes.set_title(f"{block}: {len(shifts)} slots")
    panels[0][0].set_ylabel("rows (pixels)")
    return figure, (
        "The paper's Figure 8: one dot per re-allocated slot, in pixels of its block's maps; "
        "lines: whole pixels."
    )


def draw_pair(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 4: images, their maps at a de-allocated channel and at its replacement."""
    trained = load_trained(run)
    moved = [
        (layer, slot)
        for layer in run.layers
        for slot, state in enumerate(layer.last)
        if state == MOVED and layer.source[slot] != slot
    ]
    if not moved:
        raise ValueError("no slot was re-allocated in this run.")
    first = moved[0][0]  # the first unit that has one, as in the paper
    slots = [slot for layer, slot in moved if layer is first]
    slot = max(slots, key=lambda slot: first.num_copied[first.source[slot]])
    source = first.source[slot]
    figure = _draw_maps(trained, first.name, [(slot, _RED), (source, _GREEN)], plt)
    return figure, (
        f"The paper's Figure 4: slot {slot} of {short_name(first.name)} stopped reading channel "
        f"{slot} (red) and now reads channel {source} (green). Test images; maps as the conv gets "
        "them, each on its own scale."
    )


def draw_top(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 9: the channels that were most often de- and re-allocated in the first block."""
    trained = load_trained(run)
    layers = [layer for layer in run.layers if any(layer.num_copied)]
    if not layers:
        raise ValueError("no slot was re-allocated in this run.")
    block = [layer for layer in layers if block_of(layer.name) == block_of(layers[0].name)]
    if "densenet" not in run.config.model:  # only there a channel keeps its index
        block = block[:1]
    channels = []
    for kind, colour in (("num_closed", _RED), ("num_copied", _GREEN)):
        counts: Counter[int] = Counter()
        for layer in block:
            counts.update({slot: n for slot, n in enumerate(getattr(layer, kind)) if n})
        channels += [(channel, colour) for channel, _ in counts.most_common(_TOP)]
    return _draw_maps(trained, block[-1].name, channels, plt), (
        "The paper's Figure 9: channels of the first block by number, counted over its units. Red: "
        f"the (at most) {_TOP} that were de-allocated most often; green: the (at most) {_TOP} that "
        "were copied most often. Test images; maps as the block's last unit gets them."
    )


def _draw_maps(trained: Trained, layer: str, channels: list[tuple[int, str]], plt: Any) -> Any:
    """Draw images in rows: each with its maps of some channels, in frames of a colour."""
    maps, _ = watch(trained.model, layer, trained.images[:_SHOWN])
    rows, columns = len(maps), 1 + len(channels)
    figure, axes = plt.subplots(rows, columns, figsize=(0.9 * columns, rows), squeeze=False)
    for row in range(rows):
        picture = trained.pictures[row].permute(1, 2, 0).numpy()
        axes[row][0].imshow(picture if picture.shape[-1] == 3 else picture[..., 0], cmap="gray")
        for panel, (channel, colour) in zip(axes[row][1:], channels, strict=True):
            panel.imshow(maps[row, channel].numpy(), cmap="gray", interpolation="nearest")
            panel.set_title(str(channel) if row == 0 else "", fontsize=8)
            panel.spines[:].set(visible=True, edgecolor=colour, linewidth=2)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
    return figure


def draw_inputs(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 6: histograms of single pixels, and mean against deviation of all of them."""
    trained = load_trained(run)
    layer = middle_layer(trained.model)
    norm: Any = trained.model.get_submodule(f"{layer}.norm")
    _, values = watch(trained.model, f"{layer}.norm", trained.images)
    # A fresh batch norm has seen nothing: in training it normalises by these images' statistics.
    _, fresh = watch(trained.fresh, f"{layer}.norm", trained.images)
    generator = torch.Generator().manual_seed(run.config.seed)
    channels = torch.randperm(values.shape[1], generator=generator)[: len(_TONES)].tolist()
    height, width = values.shape[2:]
    inner = [(height // 2, width // 2), (height // 3, width // 3), (height // 3, 2 * width // 3)]
    mean, std = norm.bias[channels[0]].item(), abs(norm.weight[channels[0]].item())
    border = [(0, 0), (0, width // 2), (height // 2, width - 1)]
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.7), layout="tight")
    for panel, pixels, title in ((axes[0], inner, "inner"), (axes[1], border, "boundary")):
        for (y, x), tone in zip(pixels, _TONES, strict=True):
            pixel = values[:, channels[0], y, x].numpy()
            look = {"histtype": "step", "color": tone, "label": f"({y}, {x})"}
            panel.hist(pixel, bins=30, density=True, **look)
        if std > 1e-6:
            grid = torch.linspace(mean - 4 * std, mean + 4 * std, 200)
            density = torch.distributions.Normal(mean, std).log_prob(grid).exp()
            panel.plot(grid, density, color=INK, linestyle="--", linewidth=1)
        panel.set(title=f"{title} pixels, channel {channels[0]}", xlabel="value")
        panel.legend(fontsize=7, title="pixel", title_fontsize=7)
    for panel, data, title in ((axes[2], fresh, "at the start"), (axes[3], values, "trained")):
        _draw_moments(panel, data, channels)
        panel.set(title=title, xlabel="mean", ylabel="std")
    return figure, (
        f"The paper's Figure 6, for {short_name(layer)}: the output of its batch norm over "
        f"{len(values):,} test images, before ReLU. Left: pixels of a channel; dashed: the normal "
        "distribution with batch norm's parameters, as in Eq. (1). Right: one point per pixel, "
        f"{len(channels)} channels; crosses are boundary pixels. ECDM assumes a single point per "
        "channel."
    )


def middle_layer(model: nn.Module) -> str:
    """Return the middle one of the first block's units whose 1x1 conv follows a batch norm.

    Raises:
        ValueError: there is none.
    """
    names: list[str] = [
        name
        for name, unit in model.named_modules()
        if name.startswith("blocks.0.")
        and isinstance(getattr(unit, "norm", None), nn.BatchNorm2d)
        and getattr(getattr(unit, "conv", None), "kernel_size", None) == (1, 1)
    ]
    if not names:
        raise ValueError("the network has no batch norm before a 1x1 conv.")
    return names[len(names) // 2]


def _draw_moments(axes: Any, values: Tensor, channels: list[int]) -> None:
    """Draw each pixel's mean and deviation over the images."""
    edge = torch.ones(values.shape[2:], dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    for channel, tone in zip(channels, _TONES, strict=False):
        mean, std = values[:, channel].mean(dim=0), values[:, channel].std(dim=0, correction=0)
        axes.plot(mean[~edge], std[~edge], ".", color=tone, markersize=2.5, label=f"{channel}")
        axes.plot(mean[edge], std[edge], "x", color=tone, markersize=4)
    axes.grid()
    axes.legend(fontsize=7, title="channel", title_fontsize=7)
