"""What growth by gradient chose from: the gain of every channel and offset of a layer."""

import itertools
import json
from typing import Any

import numpy as np

from selectconv.lab.report.figures.allocation import describe, short_name
from selectconv.lab.report.figures.plots import COLOURS, INK, PAPER, Figure, drawing, to_svg
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.train.run_folder import GAINS


def draw_gains(run: Run, name: str) -> Figure | None:
    """Draw the gains of the layer that re-opened most at the last step; None without gains."""
    path = run.path / GAINS
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    layer_name = max(content["layers"], key=lambda own: len(content["layers"][own]["opened"]))
    layer = content["layers"][layer_name]
    gains = np.asarray(layer["gains"]).max(axis=0)  # of a grouped conv: the best of its groups
    num_channels, num_offsets = gains.shape
    axes_of_map = round(np.log(num_offsets) / np.log(3)) if num_offsets > 1 else 0
    offsets = list(itertools.product((-1, 0, 1), repeat=axes_of_map))
    largest = max(float(np.abs(gains).max()), np.finfo(float).tiny)
    with drawing() as plt:
        from matplotlib.colors import LinearSegmentedColormap

        tones = LinearSegmentedColormap.from_list(
            "gains", [COLOURS["dealloc"], PAPER, COLOURS["select"]]
        )
        figure, axes = plt.subplots(figsize=(8, 0.9 + 0.24 * num_offsets))
        # Roots, since a few gains are far above the rest.
        shown = np.sign(gains) * np.sqrt(np.abs(gains) / largest)
        axes.pcolormesh(
            np.arange(num_channels + 1) - 0.5,
            np.arange(num_offsets + 1) - 0.5,
            shown.T,
            cmap=tones,
            vmin=-1,
            vmax=1,
        )
        for _, source, shift in layer["opened"]:
            place = 0 if shift is None else offsets.index(tuple(round(step) for step in shift))
            axes.plot(source, place, "o", color=INK, markersize=3.5)
        words = [" ".join(f"{step:+d}" if step else "0" for step in offset) for offset in offsets]
        axes.set_yticks(range(num_offsets), words if axes_of_map else ["0"], fontsize=7)
        axes.set_ylim(num_offsets - 0.5, -0.5)
        axes.set_xlabel("channel index of the layer's input")
        axes.set_ylabel("offset (pixels)")
        body = to_svg(figure, name)
    return Figure(
        "What would lower the loss",
        f"{describe(run)}. Beyond the paper: {short_name(layer_name)} at epoch {content['epoch']}. "
        "One cell per channel and offset that a re-opened slot could read. Magenta: it would lower "
        "the loss, given what the layer already reads; blue: even and odd images disagree; empty: "
        "it adds nothing new; dots: it was chosen. After each choice, the cells of its channel get "
        "new scores.",
        body,
    )
