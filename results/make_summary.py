"""Write the summaries of README, results/README.md and results/SCREENING.md, and their figures.

`make results` calls it.

Everything comes from the runs' files.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from selectconv.lab.report.collect import collect
from selectconv.lab.report.compare import Group, Row, group_runs
from selectconv.lab.report.figure import draw_figure
from selectconv.lab.report.figures import draw_costs
from selectconv.lab.report.findings import Finding, find_out, judge
from selectconv.lab.report.statistics import LEVEL, Comparison, compare, half_interval, show_p
from selectconv.lab.report.tables import show_spread
from selectconv.lab.reproduce.grid import TABLES, load_grid

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # what stands between their marks, in order
    ROOT / "README.md": ("smaller", "better"),
    ROOT / "results" / "README.md": ("long",),
    ROOT / "results" / "SCREENING.md": ("auto",),
}
FIGURE, FIGURES = ROOT / "results" / "pairs.svg", ROOT / "results" / "figures"
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
    "F": ("ResNet, CIFAR-10, 10,000 x 20 (two earlier designs of `auto` had been run on it)", ""),
    "G": ("CondenseNet, CIFAR-10, 10,000 x 20 (not used to design it)", ""),
}
# The seeds of the comparison of gamma="auto" that was fixed beforehand.
AUTO_SEEDS = {"A": range(23, 30), "B": range(20, 30)}
ARM = {"method": "{}", "growth": "growth {}", "variant": "{}"}  # what names a trial's arm
COMPRESSION = "table2"  # its networks have half of the multiply-adds: not for the short table


@cache
def load_groups() -> list[tuple[str, Group, list[Finding]]]:
    """Return the comparisons of every grid that has runs here, with the grid's name."""
    return [
        (table, group, find_out(group))
        for table in sorted(TABLES)  # the ablation first: the main result
        for group in group_runs(
            collect([ROOT / "results" / table / "runs"]).runs, load_grid(table, SCALE)
        )
    ]


def load_pairs() -> Iterator[tuple[Group, str, dict[str, Finding]]]:
    """Yield each comparison of select with plain at the same size: its answers, by measure."""
    for table, group, findings in load_groups():
        select = group.find("select")
        found = {one.column: one for one in findings if one.row is select and one.column}
        if table != COMPRESSION and found:
            num_missing = sum(len(row.missing) for row in (select, *group.baselines))
            yield group, f" ({num_missing} runs missing)" if num_missing else "", found


def as_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Write the lines of a table, below its head, in Markdown."""
    return "\n".join([head, *("| " + " | ".join(cells) + " |" for cells in rows)])


def write_pairs() -> str:
    """Compare select with plain of the same trained size, one line per training."""
    head = """\
| training | plain | select | change of the error (95 % interval) | p | of the loss | p | cost |
|---|---|---|---|---|---|---|---|"""
    rows = [
        [
            group.title + missing,
            show(found["error"].against),
            show(found["error"].row),
            *answer(found["error"]),
            *answer(found.get("loss")),
            show_costs(found["error"].against, found["error"].row),
        ]
        for group, missing, found in load_pairs()
    ]
    return as_table(head, rows)


def write_contests(about: str = "") -> str:
    """List the networks of each comparison of several, or of those about something, by cost."""
    head = """\
| training | network | error | change (95 % interval) | cost |
|---|---|---|---|---|"""
    rows = []
    for _, group, _ in load_groups():
        title = group.contest.get("title", "")
        done = [row for row in group.rows if title and title.startswith(about) and row.runs]
        for row in done:
            result = compare(done[0].measured("error"), row.measured("error"))
            change = "" if row is done[0] or result is None else show_change(result)
            words = [title if row is done[0] else "", row.name, show(row), change]
            rows.append([*words, show_costs(done[0], row)])
    return as_table(head, rows)


def show_costs(plain: Row, select: Row) -> str:
    """Show what select costs as a multiple of plain: deployed, and in training.

    In training: the fastest epoch of the second half, over all seeds; others met a busy machine.
    """
    params, macs = (
        fmean(getattr(cost, name) for cost in select.costs("deployed"))
        / fmean(getattr(cost, name) for cost in plain.costs("deployed"))
        for name in ("params", "macs")
    )
    time = next((run.time["value"] for run in select.runs.values() if run.time), math.nan)
    before, after = (
        min(
            line["seconds"]
            for run in row.runs.values()
            for line in run.metrics[len(run.metrics) // 2 :]
        )
        for row in (plain, select)
    )
    return f"{params:.2f}, {macs:.2f}, {time:.2f}; {after / before:.2f}"


def answer(finding: Finding | None) -> list[str]:
    """Show a change with its interval, and p."""
    if finding is None:
        return ["-", "-"]
    return [show_change(finding.result), show_p(finding.p).removeprefix("= ")]


def show_change(result: Comparison) -> str:
    """Show a change with its interval."""
    return f"{result.change:+.1f} % ({result.low:+.1f} to {result.high:+.1f})"


def show(row: Row) -> str:
    """Show mean, deviation and n of the error."""
    return f"{show_spread(row.measured('error').values())} % ({len(row.runs)})"


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
    for group, missing, found in load_pairs():
        error, result = found["error"], found["error"].result
        before, after = error.against.measured("error"), error.row.measured("error")
        changes = [100 * (after[seed] - before[seed]) / result.before for seed in result.seeds]
        strips.append((group, missing, result, changes))
    ends = [end for *_, result, changes in strips for end in (result.low, result.high, *changes)]
    low, high = 2 * math.floor(min(ends) / 2), 2 * math.ceil(max(ends) / 2)

    def across(change: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 20) * (change - low) / (high - low):.1f}"

    bottom = TOP + STRIP * len(strips)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}">',
        STYLE,
        f'<rect class="ground" width="{WIDTH}" height="{bottom + 50}"/>',
        '<text x="12" y="24">Error of select against plain, one dot per seed</text>',
    ]
    for tick in range(low, high + 1, 2):
        kind, label = ("line", f"{tick:+d} %") if tick else ("zero", "0")
        place = f'x="{across(tick)}" y="{bottom + 18}" text-anchor="middle"'
        lines.append(f'<path class="{kind}" d="M{across(tick)} {TOP}V{bottom}"/>')
        lines.append(f'<text class="small" {place}>{label}</text>')
    for number, (group, missing, result, changes) in enumerate(strips):
        config, y = group.config, TOP + STRIP * number + STRIP // 2
        network = config["model"].rpartition(":")[2]
        images = f"{config['subset']:,} images, " if config["subset"] else ""
        words = f"{images}{config['epochs']} epochs, {len(changes)} seeds{missing}"
        start, end, mean = (across(x) for x in (result.low, result.high, result.change))
        lines += [
            f'<text x="12" y="{y - 3}">{network} on {config["data"]}</text>',
            f'<text class="small" x="12" y="{y + 14}">{words}</text>',
            *(f'<circle class="dot" cx="{across(x)}" cy="{y - 8}" r="4.5"/>' for x in changes),
            f'<path class="mean" d="M{start} {y + 8}H{end}M{mean} {y + 2}v12" fill="none"/>',
        ]
    note = "left of 0: select is better; the bar is the mean with its 95 % interval"
    place = f'x="{WIDTH - 20}" y="{bottom + 40}" text-anchor="end"'
    return "\n".join([*lines, f'<text class="small" {place}>{note}</text>', "</svg>", ""])


@cache
def read_screening() -> list[dict[str, Any]]:
    """Read every trial of the screening."""
    text = (ROOT / "results" / "screening.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_screening() -> str:
    """List every trial of the screening."""
    head = """\
| setting | method | seed | weight decay | lr | gamma | grace | held-out error % | loss |
|---|---|---|---|---|---|---|---|---|"""
    rows = [
        [
            f"{row['model'].rpartition(':')[2]}, {row['data']}, "
            f"{row['images']:,} x {row['epochs']}",
            ", ".join(word.format(row[name]) for name, word in ARM.items() if name in row),
            *(str(row.get(name, "-")) for name in ("seed", "weight_decay", "lr", "gamma")),
            "auto" if row.get("gamma") == "auto" else str(row.get("grace", "-")),
            f"{row['holdout_error']:.2f}",
            f"{row['holdout_loss']:.4f}",
        ]
        for row in read_screening()
    ]
    return as_table(head, rows)


def read_trials(setting: str) -> list[dict[str, Any]]:
    """Return the trials of a setting by the paper's rule."""
    trials = [row for row in read_screening() if row["setting"] == setting]
    return [row for row in trials if "variant" not in row and "growth" not in row]


def write_auto() -> str:
    """Compare `gamma="auto"` with gammas that were set by hand, on the same seeds."""
    head = """\
| training | seeds | plain | best gamma by hand | `auto` | difference, points (95 % interval) |
|---|---|---:|---:|---:|---:|"""
    rows = []
    for setting, (title, folder) in SETTINGS.items():
        trials = read_trials(setting)
        found = {row["seed"]: row for row in trials if row.get("gamma") == "auto"}
        # The seeds of a comparison, then those of the screening.
        for seeds in (sorted(s for s in found if s < 200), sorted(s for s in found if s >= 200)):
            if not seeds:
                continue
            decay = found[seeds[0]]["weight_decay"]
            same = [row for row in trials if row["weight_decay"] == decay]
            plain, hand = (
                fmean(read_measure(folder, method, seed, "error") for seed in seeds)
                if seeds[0] < 200
                else best_error(same, method, seeds)
                for method in ("plain", "select")
            )
            auto = fmean(found[seed]["holdout_error"] for seed in seeds)
            errors = [f"{error:.2f} %" for error in (plain, hand, auto)]
            difference = f"{auto - hand:+.2f}"
            if seeds[0] < 200:
                reach = half_interval(
                    [
                        found[seed]["holdout_error"] - read_measure(folder, "select", seed, "error")
                        for seed in seeds
                    ]
                )
                difference += f" ({auto - hand - reach:+.2f} to {auto - hand + reach:+.2f})"
            rows.append([title, ", ".join(map(str, seeds)), *errors, difference])
    words = "With paired t-tests, on the seeds that were fixed beforehand:"
    return "\n".join([as_table(head, rows), "", words, "", *state_auto()])


def best_error(trials: list[dict[str, Any]], method: str, seeds: list[int]) -> float:
    """Return the mean error over all of the seeds, of the gamma by hand for which it is lowest."""
    by_settings: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in trials:
        if row["method"] == method and row["seed"] in seeds and row.get("gamma") != "auto":
            settings = (row["lr"], row.get("gamma"), row.get("grace"))
            by_settings.setdefault(settings, {})[row["seed"]] = row["holdout_error"]
    return min(fmean(of.values()) for of in by_settings.values() if sorted(of) == seeds)


def state_auto() -> Iterator[str]:
    """Say what the comparison of `gamma="auto"` found; a question counts if those before did."""
    for setting, seeds in AUTO_SEEDS.items():
        title, folder = SETTINGS[setting]
        trials = [row for row in read_trials(setting) if row["seed"] in seeds]
        auto = {row["seed"]: row for row in trials if row.get("gamma") == "auto"}
        is_asked = True
        for measure, digits, unit in (("loss", 4, ""), ("error", 2, " %")):
            new = {seed: row[f"holdout_{measure}"] for seed, row in auto.items()}
            for method, words in (("plain", "plain"), ("select", "select with a gamma by hand")):
                found = compare(
                    {seed: read_measure(folder, method, seed, measure) for seed in auto}, new
                )
                assert found is not None
                verdict = judge(found.p, found, 0, is_asked=is_asked)
                yield (
                    f"- {title}, {len(auto)} of {len(seeds)} seeds: held-out {measure} of auto "
                    f"{found.after:.{digits}f}{unit}, of {words} {found.before:.{digits}f}{unit}; "
                    f"p {show_p(found.p)}: {verdict}."
                )
                is_asked = is_asked and found.p < LEVEL


def read_measure(folder: str, method: str, seed: int, measure: str) -> float:
    """Read the held-out error or loss of a run of a comparison."""
    path = ROOT / "results" / f"{folder}-{method}-{seed}" / "holdout.json"
    return float(json.loads(path.read_text(encoding="utf-8"))[measure])


def write_long() -> str:
    """Compare select with plain, say all findings, grid by grid, then list the screening."""
    lines = [write_pairs(), "", write_contests(), ""]
    for table, group, findings in load_groups():
        title = f"### [`{table}`]({table}/tables.md)"
        if (findings or draw_group(table, group)) and title not in lines:
            lines += [title, ""]
        if findings or draw_group(table, group):
            lines += [f"{group.title}:", "", *(f"- {one.sentence}" for one in findings), ""]
            lines += [f"![{words}](figures/{name})" for name, words, _ in draw_group(table, group)]
            lines.append("")
    return "\n".join([*lines, "### Every trial of the screening", "", write_screening()])


@cache
def draw_group(table: str, group: Group) -> list[tuple[str, str, str]]:
    """Draw the errors of three or more rows against their deployed cost: file, words, SVG."""
    place = [one for name, one, _ in load_groups() if name == table].index(group)
    figures = []
    for kind in ("macs", "time"):
        name = f"{table}-{place}-{kind}"
        draw = partial(draw_costs, group, time=kind == "time")
        figure = draw_figure(f"Error against deployed {kind}", group.title, draw, name)
        if figure is not None and len([row for row in group.rows if row.runs]) > 2:
            figures.append((f"{name}.svg", figure.title, figure.alone))
    return figures


def fill(page: str, summaries: Iterable[str]) -> str:
    """Put summaries between the marks of a page."""
    start, *parts = page.split(BEGIN)
    blocks = zip(summaries, parts, strict=True)
    return start + "".join(
        f"{BEGIN}\n{summary}\n{END}{part.partition(END)[2]}" for summary, part in blocks
    )


def write_pages() -> dict[Path, str]:
    """Write the pages, with what the runs say between their marks, and the figure."""
    summaries = {
        "smaller": write_contests("Fair Table 2"),
        "better": write_contests("Equal deployed cost"),
        "long": write_long(),
        "auto": write_auto(),
    }
    pages = {
        path: fill(path.read_text(encoding="utf-8"), [summaries[kind] for kind in kinds])
        for path, kinds in PAGES.items()
    }
    costs = [one for table, group, _ in load_groups() for one in draw_group(table, group)]
    return {**pages, FIGURE: draw_pairs(), **{FIGURES / name: text for name, _, text in costs}}


if __name__ == "__main__":
    for path, text in write_pages().items():
        path.write_text(text, encoding="utf-8")
