"""Beyond the paper: the damage that ECDM expects beside the damage that was measured."""

from selectconv.allocate.damage import observe_damage
from selectconv.lab.report.figures.allocation import block_of, describe
from selectconv.lab.report.figures.plots import COLOURS, INK, Figure, drawing, to_svg
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.report.runs.trained import Trained

_TONES = (COLOURS["dealloc"], COLOURS["select"], COLOURS["random"], COLOURS["shift"])
_SMALLEST = 1e-6  # smaller shares are drawn here: the axes are logarithmic


def draw_damage(run: Run, trained: Trained, name: str) -> Figure:
    """Draw each open slot's largest share of an output: expected against measured."""
    report = observe_damage(trained.model, [trained.images])
    blocks: dict[str, tuple[list[float], list[float]]] = {}
    for layer in report.values():
        expected, measured = layer.shares()
        xs, ys = blocks.setdefault(block_of(layer.name), ([], []))
        xs += expected.clamp(min=_SMALLEST).tolist()
        ys += measured.clamp(min=_SMALLEST).tolist()
    ranks = [layer.rank_correlation() for layer in report.values()]
    known = sorted(rank for rank in ranks if rank is not None)
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(4.4, 3.8))
        for (block, (xs, ys)), tone in zip(blocks.items(), _TONES * len(blocks), strict=False):
            axes.loglog(xs, ys, ".", color=tone, markersize=4, alpha=0.7, label=block)
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=INK, linewidth=0.8, linestyle="--")
        if isinstance(run.config.gamma, float) and run.config.gamma > 0:
            axes.axvline(run.config.gamma, color=INK, linewidth=0.6, linestyle=":")
        axes.set_xlabel("expected share (dotted: gamma)")
        axes.set_ylabel("measured share")
        axes.legend(fontsize=8)
        body = to_svg(figure, name)
    middle = f"{known[len(known) // 2]:.2f}" if known else "undefined"
    lowest = f", lowest {known[0]:.2f}" if known else ""
    return Figure(
        "Expected and measured damage",
        f"{describe(run)}. Beyond the paper: one dot per open slot: its largest share of an "
        "output, as expected from batch norm and as measured on "
        f"{len(trained.images):,} test images. Rank correlation within a layer: median "
        f"{middle}{lowest}.",
        body,
    )
