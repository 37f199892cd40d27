"""Which channels were de- and re-allocated, where, when, and with which shifts."""

import torch
from torch import nn

from selectconv.core.models import selective_layers
from selectconv.lab.report.figures.plots import COLOURS, GRID, INK, Figure, drawing, to_svg
from selectconv.lab.report.html import render
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.report.runs.replay import LayerHistory, replay


def draw_map(run: Run, name: str) -> Figure:
    """Draw Figure 3: for each layer the channels that were de-allocated and the sources."""
    layers = [layer for layer in replay(run) if any(layer.num_closed)]
    title = "Where channels were de- and re-allocated"
    if not layers:
        return Figure(title, describe(run), problem="No slot was closed in this run.")
    width = max(len(layer.source) for layer in layers)
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(8, 0.8 + 0.26 * len(layers)))
        for line, layer in enumerate(layers):
            axes.barh(line, len(layer.source), left=-0.5, height=0.72, color=GRID, alpha=0.35)
            for slot, count in enumerate(layer.num_closed):
                if count:
                    alpha = min(1.0, 0.45 + 0.2 * count)
                    colour = COLOURS["select"]
                    axes.bar(slot, 0.72, 1, line - 0.36, color=colour, alpha=alpha, linewidth=0)
            sources = [channel for channel, count in enumerate(layer.num_copied) if count]
            axes.plot(sources, [line] * len(sources), "o", color=INK, markersize=2)
        axes.set_yticks(
            range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=7
        )
        axes.set_ylim(len(layers) - 0.4, -0.6)
        axes.set_xlim(-0.5, width - 0.5)
        axes.set_xlabel("channel index of the layer's input")
        body = to_svg(figure, name)
    return Figure(
        title,
        f"{describe(run)}. The paper's Figure 3: one line per selective conv, block by block; "
        "magenta: the slot was de-allocated (the stronger, the more often); dots: the channel was "
        "copied by re-allocation.",
        body,
    )


def draw_history(run: Run, name: str) -> Figure:
    """Draw the interactive map: pointing at a layer shows its slots over the epochs."""
    layers = replay(run)
    title = "The slots of a layer over the epochs"
    if not any(any(layer.num_closed) for layer in layers):
        return Figure(title, describe(run), problem="No slot was closed in this run.")
    slots = [
        {"name": short_name(layer.name), "states": _pack(layer), "source": layer.source}
        for layer in layers
    ]
    return Figure(
        title,
        f"{describe(run)}. Point at a layer or a slot (or use the arrow keys). Columns are slots, "
        "rows are epochs. A grey slot reads its own channel, an empty one is closed, a magenta one "
        "is re-allocated. Each row shows the end of its epoch, after the allocation step.",
        render("slots.html", name=name, layers=slots),
    )


def _pack(layer: LayerHistory) -> list[str]:
    return ["".join(str(state) for state in states) for states in layer.states]


def draw_shifts(run: Run, model: nn.Module, name: str) -> Figure:
    """Draw Figure 8: the learned shifts of re-allocated slots in pixels, one plot per block."""
    points: dict[str, list[torch.Tensor]] = {}
    for layer_name, layer in selective_layers(model).items():
        if layer.shift is not None:
            chosen = layer.shift.detach()[layer.shifted & layer.gate]
            if len(chosen):
                points.setdefault(block_of(layer_name), []).append(chosen)
    title = "Learned shifts"
    if not points:
        return Figure(title, describe(run), problem="No slot of this run is shifted.")
    reach = max(float(torch.cat(parts).abs().max()) for parts in points.values())
    edge = max(2.0, float(int(reach + 1)))
    with drawing() as plt:
        figure, all_axes = plt.subplots(
            1, len(points), figsize=(2.7 * len(points), 2.9), squeeze=False
        )
        for axes, (block, parts) in zip(all_axes[0], sorted(points.items()), strict=True):
            shifts = torch.cat(parts)
            for pixel in range(-int(edge), int(edge) + 1):
                axes.axhline(pixel, color=GRID, linewidth=0.6)
                axes.axvline(pixel, color=GRID, linewidth=0.6)
            axes.plot(
                shifts[:, 1].tolist(), shifts[:, 0].tolist(), "o",
                color=COLOURS[run.config.method], markersize=3, alpha=0.7,
            )  # fmt: skip
            axes.set_xlim(-edge, edge)
            axes.set_ylim(edge, -edge)
            axes.set_aspect("equal")
            axes.set_title(f"{block}: {len(shifts)} slots")
            axes.set_xlabel("columns")
        all_axes[0][0].set_ylabel("rows (pixels)")
        body = to_svg(figure, name)
    return Figure(
        title,
        f"{describe(run)}. The paper's Figure 8: one dot per re-allocated slot, in pixels of its "
        "block's maps; lines: whole pixels.",
        body,
    )


def short_name(layer: str) -> str:
    """`blocks.0.1.pointwise.conv` -> `block 1, unit 2, pointwise`; other names as they are."""
    parts = layer.split(".")
    if parts[0] == "blocks" and len(parts) > 3 and parts[1].isdigit() and parts[2].isdigit():
        rest = [part for part in parts[3:] if part != "conv"]
        return ", ".join([f"block {int(parts[1]) + 1}", f"unit {int(parts[2]) + 1}", *rest])
    return layer


def block_of(layer: str) -> str:
    """Return which block a layer is in, in words."""
    return short_name(layer).split(",")[0]


def describe(run: Run) -> str:
    """Name a run in a caption."""
    config = run.config
    return f"{config.model} on {config.data}, {config.method}, seed {config.seed} (n = 1)"
