"""What de-allocated and re-allocated channels look like (Figures 4 and 9)."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from selectconv.lab.report.figures.allocation import block_of, describe, short_name
from selectconv.lab.report.figures.plots import Figure, drawing, to_svg
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.report.runs.replay import MOVED, LayerHistory, replay
from selectconv.lab.report.runs.trained import Trained, watch_inputs

_RED, _GREEN = "#d9483b", "#2f9e5f"
_TOP = 5
_NUM_IMAGES = 4


def draw_pair(run: Run, trained: Trained, name: str) -> Figure:
    """Draw Figure 4: images, their maps at a de-allocated channel and at its replacement."""
    title = "A de-allocated channel and the one re-allocated in its place"
    found = _find_pair(replay(run))
    if found is None:
        return Figure(title, describe(run), problem="No slot was re-allocated in this run.")
    layer, slot = found
    images = trained.images[:_NUM_IMAGES]
    maps = watch_inputs(trained.model, layer.name, images)
    source = layer.source[slot]
    with drawing() as plt:
        size = (1.35 * len(images), 4.2)
        figure, axes = plt.subplots(3, len(images), figsize=size, squeeze=False)
        for column in range(len(images)):
            _show(axes[0][column], _picture(trained.pictures[column]))
            _show(axes[1][column], maps[column, slot], frame=_RED)
            _show(axes[2][column], maps[column, source], frame=_GREEN)
        for row, label in enumerate(("image", f"channel {slot}", f"channel {source}")):
            axes[row][0].set_ylabel(label)
        body = to_svg(figure, name)
    return Figure(
        title,
        f"{describe(run)}. The paper's Figure 4: slot {slot} of {short_name(layer.name)} stopped "
        f"reading channel {slot} (red) and now reads channel {source} (green). Test images; maps "
        "as the conv gets them, each on its own scale.",
        body,
    )


def _find_pair(layers: list[LayerHistory]) -> tuple[LayerHistory, int] | None:
    for layer in layers:  # the first unit that has one, as in the paper
        at_the_end = zip(layer.source, layer.states[-1], strict=True)
        moved = [
            slot
            for slot, (source, state) in enumerate(at_the_end)
            if state == MOVED and source != slot
        ]
        if moved:
            return layer, max(moved, key=lambda slot: layer.num_copied[layer.source[slot]])
    return None


def draw_top(run: Run, trained: Trained, name: str) -> Figure:
    """Draw Figure 9: the channels that were most often de- and re-allocated in the first block."""
    title = "The channels most often de- and re-allocated"
    layers = [layer for layer in replay(run) if any(layer.num_copied)]
    if not layers:
        return Figure(title, describe(run), problem="No slot was re-allocated in this run.")
    block = [layer for layer in layers if block_of(layer.name) == block_of(layers[0].name)]
    if "densenet" not in run.config.model:  # only there a channel keeps its index through a block
        block = block[:1]
    closed: Counter[int] = Counter()
    copied: Counter[int] = Counter()
    for layer in block:
        closed.update({slot: count for slot, count in enumerate(layer.num_closed) if count})
        copied.update({slot: count for slot, count in enumerate(layer.num_copied) if count})
    columns = [(channel, _RED) for channel, _ in closed.most_common(_TOP)]
    columns += [(channel, _GREEN) for channel, _ in copied.most_common(_TOP)]
    images = trained.images[:_NUM_IMAGES]
    maps = watch_inputs(trained.model, block[-1].name, images)
    with drawing() as plt:
        size = (0.85 * (1 + len(columns)), 0.95 * len(images))
        figure, axes = plt.subplots(len(images), 1 + len(columns), figsize=size, squeeze=False)
        for row in range(len(images)):
            _show(axes[row][0], _picture(trained.pictures[row]))
            for column, (channel, colour) in enumerate(columns, start=1):
                _show(axes[row][column], maps[row, channel], frame=colour)
                if row == 0:
                    axes[0][column].set_title(str(channel), fontsize=8)
        body = to_svg(figure, name)
    return Figure(
        title,
        f"{describe(run)}. The paper's Figure 9: channels of the first block by number, counted "
        f"over its units. Red: the (at most) {_TOP} that were de-allocated most often; green: the "
        f"(at most) {_TOP} that were copied most often. Four test images; maps as the block's last "
        "unit gets them.",
        body,
    )


def _picture(image: Tensor) -> Any:
    picture = image.permute(1, 2, 0).numpy()
    return picture if picture.shape[-1] == 3 else picture[..., 0]


def _show(axes: Any, image: Any, frame: str | None = None) -> None:
    data = image.numpy() if isinstance(image, torch.Tensor) else image
    axes.imshow(data, cmap="gray", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(frame is not None)
        if frame is not None:
            spine.set_edgecolor(frame)
            spine.set_linewidth(2)
