"""Write the summaries of README, results/README.md and docs/auto_gamma.md, and README's figure.

`make results` calls it.

Everything comes from the runs' files.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from selectconv.lab.report.compare.answers import Answer, Question, answer
from selectconv.lab.report.compare.findings import state_findings
from selectconv.lab.report.compare.groups import Group, Row, group_runs
from selectconv.lab.report.compare.statistics import compare, show_p, show_p_alone, summarize
from selectconv.lab.report.runs.collect import collect
from selectconv.lab.reproduce.grid import TABLES, load_grid

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    ROOT / "README.md": "short",
    ROOT / "results" / "README.md": "long",
    ROOT / "docs" / "auto_gamma.md": "auto",
}
FIGURE = ROOT / "results" / "pairs.svg"
BEGIN, END = "<!-- from here: results/make_summary.py -->", "<!-- to here -->"
SCALE = "reduced"
# Settings of the screening: their names, and where their comparison's runs are.
SETTINGS = {
    "A": ("DenseNet, CIFAR-10, 10,000 images x 40 epochs", "ablation/runs/densenet40-cifar10"),
    "B": ("DenseNet, Fashion-MNIST, 10,000 x 40", "table1/runs/densenet40-fashion-mnist"),
    "C": ("DenseNet, CIFAR-10, 40,000 x 10", "table1/runs/densenet40-cifar10"),
    "D": (
        "MobileNetV2-like, CIFAR-10, 10,000 x 40",
        "table1/runs/selectconv.lab.reproduce.networks-small_mobilenet-cifar10",
    ),
    "F": ("ResNet, CIFAR-10, 10,000 x 20 (not used to design it)", ""),
    "G": ("CondenseNet, CIFAR-10, 10,000 x 20 (not used to design it)", ""),
}
# The seeds of the comparison of gamma="auto" that was fixed beforehand.
AUTO_SEEDS = {"A": range(23, 30), "B": range(20, 30)}
LEVEL = 0.05
COMPRESSION = "table2"  # its networks have half of the multiply-adds: not for the short table


def load_groups() -> Iterator[tuple[str, Group]]:
    """Yield the comparisons of every grid that has runs here, with the grid's name."""
    for table in sorted(TABLES):  # the ablation first: the main result
        grid, folder = load_grid(table, SCALE), ROOT / "results" / table / "runs"
        if not folder.is_dir():
            continue
        runs = collect([folder]).runs
        for group in group_runs(
            runs, grid.missing({run.name for run in runs}, {}), grid.first, grid.margin
        ):
            yield table, group


def load_pairs() -> Iterator[tuple[Group, Row, Answer]]:
    """Yield each comparison of select with plain at the same size: its row and its answer."""
    for table, group in load_groups():
        select = group.find("select")
        found = None if select is None else answer(group).get(select.key)
        if table != COMPRESSION and select is not None and found is not None:
            yield group, select, found


def write_short() -> str:
    """Compare select with plain, one line per training."""
    lines = [
        "| training | plain | select | relative change: error | p | loss | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, select, found in load_pairs():
        missing = f" ({found.num_missing} runs missing)" if found.num_missing else ""
        cells = [f"{group.title}{missing}", show(found.error.against), show(select)]
        for question in (found.error, found.loss):
            cells += ["-", "-"] if question is None else show_question(question)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show_question(question: Question) -> list[str]:
    """Show a change with its interval, and p."""
    result = question.result
    change = f"{result.change:+.1f} % ({result.low:+.1f} to {result.high:+.1f})"
    return [change, show_p_alone(question.p)]


STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px; fill: #59636e }
  .ground { fill: #fff } .line { stroke: #d1d9e0 } .zero { stroke: #59636e }
  .dot { fill: #0969da; fill-opacity: .6 } .mean { stroke: #1f2328; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } .ground { fill: #0d1117 }
    .line { stroke: #3d444d } .zero { stroke: #9198a1 } .dot { fill: #4493f8 }
    .mean { stroke: #f0f6fc }
  }
</style>"""
LEFT, WIDTH, STRIP, TOP = 350, 820, 54, 40  # of the figure, in pixels


def draw_pairs() -> str:
    """Draw each pair's change of error, select against plain of the same seed, as SVG."""
    strips = []
    for group, select, found in load_pairs():
        before, after = found.error.against.measured("error"), select.measured("error")
        seeds = found.error.result.seeds
        base = sum(before[seed] for seed in seeds) / len(seeds)
        strips.append((group, found, [100 * (after[s] - before[s]) / base for s in seeds]))
    ends = [x for _, found, _ in strips for x in (found.error.result.low, found.error.result.high)]
    ends += [change for *_, changes in strips for change in changes]
    low, high = 2 * math.floor(min(ends) / 2), 2 * math.ceil(max(ends) / 2)

    def across(change: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 20) * (change - low) / (high - low):.1f}"

    bottom = TOP + STRIP * len(strips)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}">', STYLE]
    lines.append(f'<rect class="ground" width="{WIDTH}" height="{bottom + 50}"/>')
    lines.append('<text x="12" y="24">Error of select against plain, one dot per seed</text>')
    for tick in range(low, high + 1, 2):
        kind, x = "line" if tick else "zero", across(tick)
        lines.append(f'<path class="{kind}" d="M{x} {TOP}V{bottom}"/>')
        label = f"{tick:+d} %" if tick else "0"
        place = f'x="{x}" y="{bottom + 18}" text-anchor="middle"'
        lines.append(f'<text class="small" {place}>{label}</text>')
    for number, (group, found, changes) in enumerate(strips):
        lines += draw_strip(group, found, changes, TOP + STRIP * number + STRIP // 2, across)
    note = "left of 0: select is better; the bar is the mean with its 95 % interval"
    place = f'x="{WIDTH - 20}" y="{bottom + 40}" text-anchor="end"'
    lines.append(f'<text class="small" {place}>{note}</text>')
    return "\n".join([*lines, "</svg>", ""])


def draw_strip(
    group: Group, found: Answer, changes: list[float], y: int, across: Callable[[float], str]
) -> Iterator[str]:
    """Draw one training: its name, its pairs, and their mean with its interval."""
    config, result = group.config, found.error.result
    network = config["model"].rpartition(":")[2]
    yield f'<text x="12" y="{y - 3}">{network} on {config["data"]}</text>'
    words = f"{config['subset']:,} images, " if config["subset"] else ""
    words += f"{config['epochs']} epochs, {len(changes)} seeds"
    words += f" ({found.num_missing} runs missing)" if found.num_missing else ""
    yield f'<text class="small" x="12" y="{y + 14}">{words}</text>'
    for change in changes:
        yield f'<circle class="dot" cx="{across(change)}" cy="{y - 8}" r="4.5"/>'
    low, high, mean = across(result.low), across(result.high), across(result.change)
    yield f'<path class="mean" d="M{low} {y + 8}H{high}M{mean} {y + 2}v12" fill="none"/>'


def write_screening() -> str:
    """List every trial of the screening."""
    lines = [
        "| setting | method | seed | weight decay | lr | gamma | grace | held-out error % | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in read_screening():
        network = row["model"].rpartition(":")[2]
        cells = [
            f"{network}, {row['data']}, {row['images']:,} x {row['epochs']}",
            ", ".join(
                [
                    row["method"],
                    *(["growth by gradient"] if row.get("growth") == "gradient" else []),
                    *([row["variant"]] if "variant" in row else []),
                ]
            ),
            *(str(row[name]) for name in ("seed", "weight_decay", "lr")),
            str(row.get("gamma", "-")),
            "auto" if row.get("gamma") == "auto" else str(row.get("grace", "-")),
            f"{row['holdout_error']:.2f}",
            f"{row['holdout_loss']:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_screening() -> list[dict[str, Any]]:
    """Read every trial of the screening."""
    text = (ROOT / "results" / "screening.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_auto() -> str:
    """Compare `gamma="auto"` with gammas that were set by hand, on the same seeds."""
    lines = [
        "| training | seeds | plain | best gamma by hand | `auto` | difference |",
        "|---|---|---:|---:|---:|---:|",
    ]
    trials = [row for row in read_screening() if "variant" not in row and "growth" not in row]
    for setting, (title, folder) in SETTINGS.items():
        here = [row for row in trials if row["setting"] == setting]
        found = {row["seed"]: row for row in here if row.get("gamma") == "auto"}
        for seeds in (sorted(s for s in found if s < 200), sorted(s for s in found if s >= 200)):
            if not seeds:
                continue
            auto = fmean(found[seed]["holdout_error"] for seed in seeds)
            decay = found[seeds[0]]["weight_decay"]
            others = [row for row in here if row.get("gamma") != "auto"]
            if seeds[0] < 200:  # those of a comparison
                plain, hand = (
                    fmean(read_measure(folder, method, seed, "error") for seed in seeds)
                    for method in ("plain", "select")
                )
            else:
                same = [r for r in others if r["seed"] in seeds and r["weight_decay"] == decay]
                plain, hand = (best_error(same, method, seeds) for method in ("plain", "select"))
            cells = [title, ", ".join(map(str, seeds))]
            cells += [f"{error:.2f} %" for error in (plain, hand, auto)]
            lines.append("| " + " | ".join([*cells, f"{auto - hand:+.2f}"]) + " |")
    return "\n".join(
        [
            *lines,
            "",
            "With paired t-tests, on the seeds that were fixed beforehand:",
            "",
            *state_auto(),
        ]
    )


def best_error(trials: list[dict[str, Any]], method: str, seeds: list[int]) -> float:
    """Return the mean error over all of the seeds, of the settings for which it is lowest."""
    by_settings: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in trials:
        if row["method"] == method:
            settings = (row["lr"], row.get("gamma"), row.get("grace"))
            by_settings.setdefault(settings, {})[row["seed"]] = row["holdout_error"]
    return min(fmean(of.values()) for of in by_settings.values() if sorted(of) == seeds)


def state_auto() -> Iterator[str]:
    """Say what the comparison of `gamma="auto"` found; a question counts if those before did."""
    trials = [row for row in read_screening() if "variant" not in row and "growth" not in row]
    for setting, seeds in AUTO_SEEDS.items():
        title, folder = SETTINGS[setting]
        auto = {
            row["seed"]: row
            for row in trials
            if (row["setting"], row.get("gamma")) == (setting, "auto") and row["seed"] in seeds
        }
        counts = True
        for measure, digits, unit in (("loss", 4, ""), ("error", 2, " %")):
            new = {seed: row[f"holdout_{measure}"] for seed, row in auto.items()}
            for method, words in (("plain", "plain"), ("select", "select with a gamma by hand")):
                old = {seed: read_measure(folder, method, seed, measure) for seed in auto}
                found = compare(old, new)
                if found is None:
                    continue
                verdict = "lower" if fmean(new.values()) < fmean(old.values()) else "higher"
                if found.p >= LEVEL:
                    verdict = "no difference found"
                if not counts:
                    verdict = "does not count, since a question before it found no difference"
                yield (
                    f"- {title}, {len(auto)} of {len(seeds)} seeds: held-out {measure} of auto "
                    f"{fmean(new.values()):.{digits}f}{unit}, of {words} "
                    f"{fmean(old.values()):.{digits}f}{unit}; {show_p(found.p)}: {verdict}."
                )
                counts = counts and found.p < LEVEL


def read_measure(folder: str, method: str, seed: int, measure: str) -> float:
    """Read the held-out error or loss of a run of a comparison."""
    path = ROOT / "results" / f"{folder}-{method}-{seed}" / "holdout.json"
    return float(json.loads(path.read_text(encoding="utf-8"))[measure])


def write_long() -> str:
    """Say all findings, grid by grid."""
    lines: list[str] = []
    heading = ""
    for table, group in load_groups():
        title = f"### [`{table}`]({table}/tables.md)"
        if title != heading:
            lines += [title, ""]
            heading = title
        findings = state_findings(group, answer(group))
        lines += [f"{group.title}:", "", *(f"- {line}" for line in findings), ""]
    return "\n".join(lines).rstrip()


def show(row: Row | None) -> str:
    """Show mean, deviation and n of the error."""
    if row is None:
        return "-"
    summary = summarize(list(row.measured("error").values()))
    return f"{summary.mean:.2f} ± {summary.std:.2f} % ({summary.n})"


def fill(page: str, summary: str) -> str:
    """Put a summary between the marks of a page."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page lacks one of the marks {BEGIN!r} and {END!r}.")
    return f"{before}{begin}\n{summary}\n{end}{after}"


def write_pages() -> dict[Path, str]:
    """Write the pages, with what the runs say between their marks, and the figure."""
    long = f"{write_long()}\n\n### Every trial of the screening\n\n{write_screening()}"
    summaries = {"short": write_short(), "long": long, "auto": write_auto()}
    pages = {
        path: fill(path.read_text(encoding="utf-8"), summaries[kind])
        for path, kind in PAGES.items()
    }
    return {**pages, FIGURE: draw_pairs()}


def main() -> None:
    """Rewrite the pages and the figure."""
    for path, text in write_pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
