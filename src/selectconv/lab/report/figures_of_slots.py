"""Figures of one run's log: which channels were de- and re-allocated, where and when.

Each function gets the run and pyplot, and returns a figure with its caption.
"""

from typing import Any

from selectconv.lab.report.collect import Run
from selectconv.lab.report.figure import COLOURS, GRID, INK
from selectconv.lab.report.html import render


def draw_map(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 3: for each layer the channels that were de-allocated and the sources."""
    layers = [layer for layer in run.layers if any(layer.num_closed)]
    if not layers:
        raise ValueError("no slot was closed in this run.")
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.26 * len(layers)))
    for line, layer in enumerate(layers):
        axes.barh(line, len(layer.source), left=-0.5, height=0.72, color=GRID, alpha=0.35)
        for slot, count in enumerate(layer.num_closed):
            if count:
                look = {"color": COLOURS["select"], "alpha": min(1.0, 0.45 + 0.2 * count)}
                axes.bar(slot, 0.72, 1, line - 0.36, linewidth=0, **look)
        sources = [channel for channel, count in enumerate(layer.num_copied) if count]
        axes.plot(sources, [line] * len(sources), "o", color=INK, markersize=2)
    axes.set_yticks(range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=7)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(-0.5, max(len(layer.source) for layer in layers) - 0.5)
    axes.set_xlabel("channel index of the layer's input")
    return figure, (
        "The paper's Figure 3: one line per selective conv, block by block; magenta: the slot was "
        "de-allocated (the stronger, the more often); dots: the channel was copied by "
        "re-allocation."
    )


def draw_history(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw the interactive map: pointing at a layer shows its slots over the epochs."""
    if not any(any(layer.num_closed) for layer in run.layers):
        raise ValueError("no slot was closed in this run.")
    layers = [
        {
            "name": short_name(layer.name),
            "states": ["".join(map(str, states)) for states in layer.states],
            "source": layer.source,
        }
        for layer in run.layers
    ]
    return render("slots.html", layers=layers), (
        "Point at a layer or a slot (or use the arrow keys). Columns are slots, rows are epochs. A "
        "grey slot reads its own channel, an empty one is closed, a magenta one is re-allocated. "
        "Each row shows the end of its epoch, after the allocation step."
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
