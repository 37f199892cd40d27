"""Draw the figures of docs/, by `make figures`: operations, enlarged kernel, ratios, gammas."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from selectconv.functional import shift2d

HERE = Path(__file__).parent
INK, BLUE, ORANGE, GREY = "#22313f", "#2f6fab", "#d9772b", "#c9d0d6"
# Importance of six channels; 0 is the one that contributes nothing.
IMPORTANCE = (0.35, 0.03, 0.95, 0.5, 0.05, 0.25)
CLOSED, SOURCE = (1, 4), 2
SHIFTS = ((0.6, -0.9), (-1.2, 0.4))

plt.rcParams.update(
    {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "svg.hashsalt": "selectconv"}
)


def tint(colour: str, amount: float) -> tuple[float, ...]:
    """Mix a colour with white: the more important a channel, the more saturated."""
    return tuple(1 - min(amount, 1) * (1 - part) for part in to_rgb(colour))


def channel(
    ax: Axes, x: float, y: float, importance: float | None, label: str, colour: str = BLUE
) -> None:
    """Draw one channel as a square; None: the slot is closed."""
    face = "white" if importance is None else tint(colour, 0.15 + 0.85 * importance)
    edge = GREY if importance is None else INK
    style = "--" if importance is None else "-"
    ax.add_patch(Rectangle((x, y), 1, 0.8, facecolor=face, edgecolor=edge, linestyle=style, lw=1.2))
    dark = importance is not None and importance > 0.6
    ax.text(
        x + 0.5, y + 0.4, label, ha="center", va="center", fontsize=9.5,
        color="white" if dark else ("#7b8791" if importance is None else INK),
    )  # fmt: skip


def draw_operations() -> None:
    """Figure 1 of the paper: de-allocation closes slots, re-allocation fills them."""
    fig, ax = plt.subplots(figsize=(9.6, 4.2))
    columns = (0.0, 5.6, 11.2)
    titles = ("input of a conv", "after dealloc", "after realloc")
    for x, title in zip(columns, titles, strict=True):
        ax.text(x + 0.5, 6.35, title, ha="center", weight="bold")
    for slot, importance in enumerate(IMPORTANCE):
        y = 5.2 - slot
        channel(ax, columns[0], y, importance, f"$X_{slot}$")
        closed = slot in CLOSED
        channel(
            ax, columns[1], y, None if closed else importance, "closed" if closed else f"$X_{slot}$"
        )
        if closed:
            b = SHIFTS[CLOSED.index(slot)]
            channel(ax, columns[2], y, IMPORTANCE[SOURCE], f"$X_{SOURCE}$", ORANGE)
            ax.text(
                columns[2] + 1.15, y + 0.4, f"$b_{slot}$ = ({b[0]:+.1f}, {b[1]:+.1f})", va="center"
            )
            ax.text(columns[0] - 0.15, y + 0.4, "nECDM ≈ 0", ha="right", va="center", color=ORANGE)
            ax.add_patch(
                FancyArrowPatch(
                    (columns[1] + 1.05, 5.2 - SOURCE + 0.4), (columns[2] - 0.05, y + 0.4),
                    arrowstyle="-|>", mutation_scale=12, color=ORANGE, lw=1.3,
                )
            )  # fmt: skip
        else:
            channel(ax, columns[2], y, importance, f"$X_{slot}$")
    for x, name, note in (
        (columns[0] + 3.3, "dealloc", "$g_i \\leftarrow 0$"),
        (columns[1] + 3.3, "realloc", "$\\pi_i \\leftarrow \\pi_c,\\ W_i \\leftarrow 0$"),
    ):
        ax.annotate(
            "", xy=(x + 1.1, 5.6), xytext=(x - 1.1, 5.6), arrowprops={"arrowstyle": "->", "lw": 1.2}
        )
        ax.text(x, 5.75, name, ha="center", family="monospace")
        ax.text(x, 5.15, note, ha="center", fontsize=8.5)
    ax.text(
        6.1, -0.45, ha="center",
        s="Same number of weights; three of six slots now read the channel that matters most.",
        style="italic", fontsize=9.5,
    )  # fmt: skip
    ax.set(xlim=(-2.4, 15.2), ylim=(-0.7, 7.0), aspect="equal")
    ax.axis("off")
    save(fig, "operations")


def draw_enlarged_kernel() -> None:
    """Figure 2 of the paper: shifted copies enlarge a 1x1 kernel for one channel."""
    size = 7
    fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.5))
    shifts = [(0.0, 0.0), *SHIFTS]
    # What a 1x1 conv with weights 1 on the channel and its copies reads, for the output at (3, 3):
    # the taps are the gradient of that output in the input.
    taps = []
    for shift in shifts:
        x = torch.zeros(1, 1, size, size, requires_grad=True)
        shift2d(x, torch.tensor([shift]))[0, 0, 3, 3].backward()
        assert x.grad is not None
        taps.append(x.grad[0, 0].numpy())
    kernels = (taps[0], taps[1] + taps[2], sum(taps))
    titles = (
        "the channel itself: 1x1",
        "two shifted copies: 2x2 taps each",
        "together: an enlarged kernel",
    )
    for ax, kernel, title in zip(axes, kernels, titles, strict=True):
        for row in range(size):
            for column in range(size):
                value = float(kernel[row, column])
                colour = ORANGE if ax is not axes[0] and value < 0.999 else BLUE
                face = tint(colour, 0.15 + 0.85 * value) if value > 0 else "white"
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=GREY, lw=0.8))
                if value > 0:
                    ax.text(
                        column + 0.5, row + 0.5, f"{round(value, 2):g}", ha="center", va="center",
                        fontsize=7.5, color="white" if value > 0.6 else INK,
                    )  # fmt: skip
        ax.add_patch(Rectangle((3, 3), 1, 1, fill=False, edgecolor=INK, lw=1.8))
        if ax is not axes[0]:
            for dy, dx in SHIFTS:
                ax.add_patch(Circle((3.5 + dx, 3.5 + dy), 0.1, facecolor=INK, zorder=3))
        ax.set(xlim=(-0.05, size + 0.05), ylim=(size + 0.05, -0.05), aspect="equal", title=title)
        ax.title.set_fontsize(10)
        ax.axis("off")
    fig.tight_layout()
    save(fig, "enlarged_kernel")


def draw_ratios() -> None:
    """The recorded ratios of `make bench-check`: medians and spreads over the plain network."""
    rows = json.loads((HERE.parents[1] / "benchmarks" / "ratios.json").read_text())
    fig, ax = plt.subplots(figsize=(9.6, 0.9 + 0.3 * len(rows)))
    for place, row in enumerate(reversed(rows)):
        colour = ORANGE if row["name"] == "step" else BLUE
        ax.plot(row["spread"], [place, place], color=tint(colour, 0.4), lw=4, solid_capstyle="butt")
        ax.plot(row["value"], place, "o", color=colour, ms=6)
        if "macs_ratio" in row:
            ax.plot(row["macs_ratio"], place, "|", color=INK, ms=10, mew=1.6)
    names = [row["case"].rpartition(":")[0].rpartition(":")[2] or row["case"] for row in rows]
    kinds = [row["case"].rpartition(": ")[2].removesuffix(" / plain") for row in rows]
    labels = [f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True)]
    ax.set_yticks(range(len(rows)), labels[::-1], fontsize=8)
    ax.axvline(1, color=INK, lw=1)
    ax.set(xlim=(0, None), xlabel="CPU time over the plain network's; |: multiply-adds")
    ax.spines[["top", "right"]].set_visible(False)
    save(fig, "ratios")


def draw_gammas() -> None:
    """The screening's curves of the first two settings: slots that were moved, by epoch."""
    text = (HERE.parents[1] / "results" / "screening.jsonl").read_text()
    trials = [json.loads(line) for line in text.splitlines()]
    settings = {"A": "CIFAR-10, 10,000 images", "B": "Fashion-MNIST, 10,000 images"}
    fig, axes = plt.subplots(1, len(settings), figsize=(9.6, 3.6), sharey=True)
    for ax, (setting, title) in zip(axes, settings.items(), strict=True):
        for trial in trials:
            here = trial["setting"] == setting and trial["seed"] == 200
            if not here or "moved_by_epoch" not in trial or trial["weight_decay"] != 0.001:
                continue
            if "variant" in trial or "growth" in trial:  # tried and dropped
                continue
            gamma = trial["gamma"] if isinstance(trial["gamma"], str) else f"{trial['gamma']:g}"
            is_auto = gamma == "auto"
            words = f"gamma {gamma}" + (f", grace {trial['grace']}" if not is_auto else "")
            ax.plot(
                trial["moved_by_epoch"],
                color=ORANGE if is_auto else tint(BLUE, 12 * trial["gamma"] + 0.3),
                label=f"{words}: held-out error {trial['holdout_error']:.2f} %",
            )
        ax.set(title=title, xlabel="epoch")
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("slots that were moved")
    save(fig, "gammas")


def save(fig: plt.Figure, name: str) -> None:
    """Write a figure as SVG, without the date so that redrawing changes nothing."""
    fig.savefig(
        HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None}, facecolor="white"
    )
    plt.close(fig)
    print(f"docs/figures/{name}.svg")


if __name__ == "__main__":
    draw_operations()
    draw_enlarged_kernel()
    draw_ratios()
    draw_gammas()
