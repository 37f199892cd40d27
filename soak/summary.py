"""Writes the results of all campaigns into soak/CAMPAIGNS.md."""

from collections import Counter
from pathlib import Path
from typing import Any

from soak.driver import RESULTS, WRONG, load_campaign, one_line, results_of

# In the order in which they run.
CAMPAIGNS = ("networks", "filters", "damage", "calls", "pairs", "kills", "full_disk", "ranks")
PAGE = Path(__file__).parent / "CAMPAIGNS.md"
HEAD = "| campaign | wanted | trials | how they ended | wrong |\n|---|---|---|---|---|"
MOST = 12  # findings that are listed


def describe_results(seed: int, folder: Path = RESULTS) -> str:
    """Return the table of all campaigns, and a line for each trial that went wrong."""
    found = {name: list(results_of(name, seed, folder).values()) for name in CAMPAIGNS}
    dates = sorted({row["date"] for rows in found.values() for row in rows})
    when = f"run on {' to '.join(sorted({dates[0], dates[-1]}))}" if dates else "not run yet"
    lines = [f"Seed {seed}, {when}.", "", HEAD]
    lines += [_describe(name, rows) for name, rows in found.items()]
    wrong = [(name, row) for name, rows in found.items() for row in rows if row["how"] in WRONG]
    if wrong:
        lines += ["", "What went wrong (`python -m soak NAME --trial N` repeats it):", ""]
        lines += [
            f"- `{name}` {row['trial']}, {row['what'] or 'unknown'}: {row['how']}: "
            f"{one_line(row.get('detail', ''), 200)}"
            for name, row in wrong[:MOST]
        ]
    if len(wrong) > MOST:
        lines.append(f"- and {len(wrong) - MOST} more in soak/results/")
    return "\n".join(lines)


def _describe(name: str, rows: list[dict[str, Any]]) -> str:
    campaign = load_campaign(name)
    ends = Counter(row["how"] for row in rows if row["how"] not in WRONG)
    wrong = Counter(row["how"] for row in rows if row["how"] in WRONG)
    kills = sum(row.get("kills", 0) for row in rows)
    trials = f"{len(rows)} of {campaign.COUNT}" + (f", {kills} kills" if kills else "")
    return (
        f"| `{name}`: {campaign.TITLE} | {campaign.WANTED} | {trials} | {_counts(ends) or '-'} | "
        f"{_counts(wrong) or ('0' if rows else '-')} |"
    )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {how}" for how, count in counter.most_common())
