"""The figures: methods side by side (Section 3.3's, and pairs by seed), and one run at a time.

Each function gets a comparison or a run, and pyplot, and returns a figure with its caption. Those
of a run show which channels were de- and re-allocated, and its network on test images.
"""

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import cycle
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.core.models import selective_layers
from selectconv.errors import BadValue
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.registry import load_dataset
from selectconv.lab.report.collect import MOVED, Run
from selectconv.lab.report.compare import Group, Row
from selectconv.lab.report.figure import COLOURS, GRID, INK, render
from selectconv.lab.report.statistics import half_interval
from selectconv.lab.train.network import build_model, load_network
from selectconv.lab.train.run_folder import LAST

_RED, _GREEN = "#d9483b", "#2f9e5f"
_TONES = (COLOURS["dealloc"], COLOURS["select"], COLOURS["random"])
_NUM_IMAGES = 512  # for the histograms of hidden inputs
_SHOWN = 4  # images of which feature maps are drawn
_TOP = 5


def draw_errors(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw Figure 5: one box per method, one dot per seed."""
    rows = [row for row in group.rows if row.runs]
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(rows), 3.4))
    for place, row in enumerate(rows):
        errors = list(row.measured("error").values())
        parts = ("boxprops", "whiskerprops", "capprops", "medianprops")
        look: dict[str, Any] = {part: {"color": row_colour(row)} for part in parts}
        axes.boxplot([errors], positions=[place], widths=0.5, showfliers=False, **look)
        axes.plot([place + 0.35] * len(errors), errors, "o", color=row_colour(row), markersize=3)
    axes.set_xticks(range(len(rows)), [row.name.replace(" ", "\n") for row in rows])
    axes.set_ylabel(f"{group.endpoint} error, last epoch (%)")
    counts = ", ".join(f"{row.name} {len(row.runs)}" for row in rows)
    return figure, f"The paper's Figure 5. Box: quartiles and median; one dot per seed: {counts}."


def draw_costs(group: Group, plt: Any, *, time: bool = False) -> tuple[Any, str] | None:
    """Draw each row's error against its deployed multiply-adds or time; None: that is unknown."""
    places = {
        row: mean(cost.macs for cost in costs) / 1e6
        for row, costs in ((row, row.costs("deployed")) for row in group.rows)
        if costs
    }
    words = "deployed multiply-adds (millions)"
    if time:
        timed = {row: [run.time["ms"] for run in row.runs.values() if run.time] for row in places}
        places = {row: mean(own) for row, own in timed.items() if own}
        words = "time in ONNX Runtime, one thread (ms a batch)"
    if not places:
        return None
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for marker, (row, place) in zip(cycle("osD^vPX*"), places.items(), strict=False):
        errors = list(row.measured("error").values())
        look = {"color": row_colour(row), "marker": marker, "capsize": 3, "label": row.name}
        axes.errorbar(place, mean(errors), half_interval(errors), linestyle="", **look)
    axes.set(xlabel=words, ylabel=f"{group.endpoint} error, last epoch (%)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1 + (len(places) > 4))
    return figure, "Mean error of each row with its 95 % interval; lower left is better."


def draw_losses(group: Group, plt: Any) -> tuple[Any, str]:
    """Draw Figure 7: the test loss of each method's run of median error."""
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for row in [row for row in group.rows if row.runs]:
        run = median_run(row.runs.values())
        losses = [line["test_loss"] for line in run.metrics]
        axes.plot(losses, color=row_colour(row), label=f"{row.name} (seed {run.config.seed})")
    stop = math.ceil(group.config["stop_at"] * group.config["epochs"]) - 1
    axes.axvline(stop, color=GRID, linestyle="--", linewidth=1)
    axes.set(xlabel="epoch (dashed: the last epoch that selects channels)", ylabel="test loss")
    axes.legend()
    return figure, "The paper's Figure 7: for each method, the run of median last test error."


def median_run(runs: Iterable[Run]) -> Run:
    """Return the run of median last error; for an even number, the better of the middle two."""
    ordered = sorted(runs, key=lambda run: (run.error, run.config.seed))
    return ordered[(len(ordered) - 1) // 2]


def draw_shift_counts(group: Group, plt: Any) -> tuple[Any, str] | None:
    """Draw how many slots are shifted by `select` against +S; None where one of them is missing."""
    shift, select = group.find("shift"), group.find("select")
    if not shift.runs or not select.runs:
        return None
    layers = next(iter(shift.runs.values())).layers
    everywhere = sum(len(layer.source) for layer in layers if layer.can_shift)
    moved = [int(run.metrics[-1]["moved"]) for run in select.runs.values()]
    figure, axes = plt.subplots(figsize=(5.2, 1.7))
    colours = [COLOURS["select"], COLOURS["shift"]]
    axes.barh(["select", "+S"], [mean(moved), everywhere], color=colours, height=0.6)
    axes.plot(moved, ["select"] * len(moved), "o", color=INK, markersize=3)
    axes.set_xlabel("slots with a shift at the end (dots: seeds)")
    ratio = everywhere / mean(moved) if any(moved) else math.inf
    return figure, (
        f"+S shifts {everywhere} slots, select {mean(moved):.0f} on average over {len(moved)} "
        f"seeds: {ratio:.1f} times fewer. The paper (Section 3.3): about 5 times fewer."
    )


def row_colour(row: Row) -> str:
    """Return a method's colour; with a setting that is gone it is drawn in ink."""
    return INK if row.gone else COLOURS[row.method]


def short_name(layer: str) -> str:
    """`blocks.0.1.pointwise.conv` -> `block 1, unit 2, pointwise`; other names as they are."""
    match layer.split("."):
        case ["blocks", block, unit, *rest] if block.isdigit() and unit.isdigit():
            words = [f"block {int(block) + 1}", f"unit {int(unit) + 1}", *rest]
            return ", ".join(word for word in words if word != "conv")
    return layer


def block_of(layer: str) -> str:
    """Return which block a layer is in, in words."""
    return short_name(layer).split(",")[0]


def draw_map(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 3: for each layer the channels that were de-allocated and the sources."""
    layers = [layer for layer in run.layers if layer.closed]
    if not layers:
        raise BadValue("no slot was closed in this run.")
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.26 * len(layers)))
    for line, layer in enumerate(layers):
        axes.barh(line, len(layer.source), left=-0.5, height=0.72, color=GRID, alpha=0.35)
        for slot, count in layer.closed.items():
            look = {"color": COLOURS["select"], "alpha": min(1.0, 0.45 + 0.2 * count)}
            axes.bar(slot, 0.72, 1, line - 0.36, linewidth=0, **look)
        axes.plot([*layer.copied], [line] * len(layer.copied), "o", color=INK, markersize=2)
    axes.set_yticks(range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=7)
    axes.set(ylim=(len(layers) - 0.4, -0.6), xlabel="channel index of the layer's input")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, (
        "The paper's Figure 3: one line per selective conv, block by block; magenta: the slot was "
        "de-allocated (the stronger, the more often); dots: the channel was copied by "
        "re-allocation."
    )


def draw_history(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw the interactive map: pointing at a layer shows its slots over the epochs."""
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


@lru_cache(maxsize=1)
def load_trained(run: Run) -> tuple[nn.Module, DatasetInfo, Tensor, Tensor]:
    """Load a run's network, in evaluation mode, and test images: normalised, and to look at.

    Raises:
        SelectConvError, ValueError: its weights or images are missing or damaged.
    """
    config, weights = run.config, run.path / LAST
    if not weights.exists():
        raise BadValue(f"it needs the run's {LAST}, which was not kept.")
    splits = load_dataset(
        config.data,
        config.data_root,
        fetch=False,
        test_subset=config.test_subset,
        image_size=config.image_size,
    )
    if not isinstance(splits.test, ImageSet):
        raise BadValue("it is drawn for data sets of small images only.")
    model = load_network(config, splits.info, weights)
    pictures = splits.test.images[:_NUM_IMAGES]
    means, stds = (torch.tensor(v).view(-1, 1, 1) for v in (splits.info.mean, splits.info.std))
    return model, splits.info, (pictures / 255 - means) / stds, pictures


@torch.no_grad()
def watch(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a module's input and output for these images."""
    seen: list[tuple[Tensor, Tensor]] = []
    # Copied at once: activations work in place.
    hook = model.get_submodule(name).register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0].clone(), output.clone()))
    )
    with hook:
        model(images)
    return seen[0]


def draw_shifts(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 8: the learned shifts of re-allocated slots in pixels, one plot per block."""
    model, *_ = load_trained(run)
    blocks: dict[str, Tensor] = {}
    for name, layer in selective_layers(model).items():
        if layer.shift is not None:
            chosen = layer.shift.detach()[layer.shifted & layer.gate]
            block = block_of(name)
            blocks[block] = torch.cat([blocks.get(block, chosen[:0]), chosen])
    points = {block: shifts for block, shifts in sorted(blocks.items()) if len(shifts)}
    if not points:
        raise BadValue("no slot of this run is shifted.")
    edge = max(2, *(int(shifts.abs().max() + 1) for shifts in points.values()))
    square = {"figsize": (2.7 * len(points), 2.9), "subplot_kw": {"aspect": "equal"}}
    figure, panels = plt.subplots(1, len(points), squeeze=False, **square)
    for axes, (block, shifts) in zip(panels[0], points.items(), strict=True):
        look = {"color": COLOURS[run.config.method], "markersize": 3, "alpha": 0.7}
        axes.plot(shifts[:, 1].tolist(), shifts[:, 0].tolist(), "o", **look)
        whole = range(-edge, edge + 1)
        axes.set(xlim=(-edge, edge), ylim=(edge, -edge), xticks=whole, yticks=whole)
        axes.set(title=f"{block}: {len(shifts)} slots", xlabel="columns (pixels)")
        axes.grid()
    panels[0, 0].set(ylabel="rows (pixels)")
    return figure, (
        "The paper's Figure 8: one dot per re-allocated slot, in pixels of its block's maps; "
        "lines: whole pixels."
    )


def draw_pair(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 4: images, their maps at a de-allocated channel and at its replacement."""
    moved = [
        (layer, slot)
        for layer in run.layers
        for slot, state in enumerate(layer.states[-1])
        if state == MOVED and layer.source[slot] != slot
    ]
    if not moved:
        raise BadValue("no slot was re-allocated in this run.")
    first = moved[0][0]  # the first unit that has one, as in the paper
    slots = [slot for layer, slot in moved if layer is first]
    slot = max(slots, key=lambda slot: first.copied[first.source[slot]])
    source = first.source[slot]
    return _draw_maps(run, first.name, [(slot, _RED), (source, _GREEN)], plt), (
        f"The paper's Figure 4: slot {slot} of {short_name(first.name)} stopped reading channel "
        f"{slot} (red) and now reads channel {source} (green). Test images; maps as the conv gets "
        "them, each on its own scale."
    )


def draw_top(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 9: the channels that were most often de- and re-allocated in the first block."""
    layers = [layer for layer in run.layers if layer.copied]
    if not layers:
        raise BadValue("no slot was re-allocated in this run.")
    block = [layer for layer in layers if block_of(layer.name) == block_of(layers[0].name)]
    if "densenet" not in run.config.model:  # only there a channel keeps its index
        block = block[:1]
    closed = sum((layer.closed for layer in block), Counter[int]())
    copied = sum((layer.copied for layer in block), Counter[int]())
    channels = [(channel, _RED) for channel, _ in closed.most_common(_TOP)]
    channels += [(channel, _GREEN) for channel, _ in copied.most_common(_TOP)]
    return _draw_maps(run, block[-1].name, channels, plt), (
        "The paper's Figure 9: channels of the first block by number, counted over its units. Red: "
        f"the (at most) {_TOP} that were de-allocated most often; green: the (at most) {_TOP} that "
        "were copied most often. Test images; maps as the block's last unit gets them."
    )


def _draw_maps(run: Run, layer: str, channels: list[tuple[int, str]], plt: Any) -> Any:
    """Draw images in rows: each with its maps of some channels, in frames of a colour."""
    model, _, images, pictures = load_trained(run)
    maps, _ = watch(model, layer, images[:_SHOWN])
    rows, columns = len(maps), 1 + len(channels)
    options: dict[str, Any] = {"squeeze": False, "subplot_kw": {"xticks": [], "yticks": []}}
    figure, axes = plt.subplots(rows, columns, figsize=(0.9 * columns, rows), **options)
    for picture, own, (first, *others) in zip(pictures, maps, axes, strict=False):
        first.imshow(picture.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray")
        for panel, (channel, colour) in zip(others, channels, strict=True):
            panel.imshow(own[channel].numpy(), cmap="gray", interpolation="nearest")
            panel.spines[:].set(visible=True, edgecolor=colour, linewidth=2)
    for panel, (channel, _) in zip(axes[0][1:], channels, strict=True):
        panel.set_title(str(channel), fontsize=8)
    return figure


def draw_inputs(run: Run, plt: Any) -> tuple[Any, str]:
    """Draw Figure 6: histograms of single pixels, and mean against deviation of all of them."""
    model, info, images, _ = load_trained(run)
    layer = middle_layer(model)
    _, values = watch(model, f"{layer}.norm", images)
    torch.manual_seed(run.config.seed)  # the weights it began with
    # A fresh batch norm has seen nothing: in training it normalises by these images' statistics.
    _, fresh = watch(build_model(run.config, info).train(), f"{layer}.norm", images)
    channels = torch.randperm(values.shape[1])[: len(_TONES)].tolist()
    height, width = values.shape[2:]
    inner = [(height // 2, width // 2), (height // 3, width // 3), (height // 3, 2 * width // 3)]
    border = [(0, 0), (0, width // 2), (height // 2, width - 1)]
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.7), layout="tight")
    for panel, pixels, title in ((axes[0], inner, "inner"), (axes[1], border, "boundary")):
        for (y, x), tone in zip(pixels, _TONES, strict=True):
            look = {"histtype": "step", "color": tone, "label": f"({y}, {x})"}
            panel.hist(values[:, channels[0], y, x].numpy(), bins=30, density=True, **look)
        panel.set(title=f"{title} pixels, channel {channels[0]}", xlabel="value")
        panel.legend(title="pixel")
    edge = torch.ones(height, width, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    for panel, data, title in ((axes[2], fresh, "at the start"), (axes[3], values, "trained")):
        for channel, tone in zip(channels, _TONES, strict=False):
            means, stds = data[:, channel].mean(dim=0), data[:, channel].std(dim=0, correction=0)
            panel.plot(means[~edge], stds[~edge], ".", color=tone, label=f"{channel}")
            panel.plot(means[edge], stds[edge], "x", color=tone)
        panel.set(title=title, xlabel="mean", ylabel="std")
        panel.legend(title="channel")
    return figure, (
        f"The paper's Figure 6, for {short_name(layer)}: the output of its batch norm over "
        f"{len(values):,} test images, before ReLU. Left: pixels of a channel. Right: one point "
        f"per pixel, {len(channels)} channels; crosses are boundary pixels. ECDM assumes a single "
        "point per channel."
    )


def middle_layer(model: nn.Module) -> str:
    """Return the middle one of the first block's units whose 1x1 conv follows a batch norm.

    Raises:
        ValueError: no unit of the first block is like that.
    """
    names: list[str] = [
        name
        for name, unit in model.named_modules()
        if name.startswith("blocks.0.")
        and isinstance(getattr(unit, "norm", None), nn.BatchNorm2d)
        and getattr(getattr(unit, "conv", None), "kernel_size", None) == (1, 1)
    ]
    if not names:
        raise BadValue("the network has no batch norm before a 1x1 conv.")
    return names[len(names) // 2]
