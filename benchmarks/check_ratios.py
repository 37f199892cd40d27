"""Compare today's ratios with the recorded ones: `make bench-check`.

    python benchmarks/check_ratios.py [--record] [--repeats 7]

Each line of `ratios.json` is a ratio of `selectconv bench`: CPU time over the plain network's, one
thread, sides in turn, so that a busy machine slows both alike. A median that is more than `MARGIN`
above the recorded one fails the check, unless the smallest of its measurements is not: then the run
was too noisy to tell, and the line says so. `--record` writes the file anew; do so on purpose, with
the reason in the commit.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from selectconv.core.threads import num_threads
from selectconv.lab.bench.cases import Subject, measure_infer, measure_step

FILE = Path(__file__).with_name("ratios.json")
MARGIN = 0.15
SMALL = Subject("selectconv.lab.reproduce.networks:small_mobilenet", image_size=16, batch_size=32)
_KEPT = ("name", "case", "value", "n", "spread", "path", "torch", "hardware", "date", "macs_ratio")


def measure(repeats: int) -> list[dict[str, Any]]:
    """Measure what the file records; returns its lines."""
    rows = [
        *measure_step(SMALL, repeats),
        *measure_infer(replace(SMALL, batch_size=1), repeats),
        *measure_infer(replace(SMALL, batch_size=8), repeats, "onnxruntime"),
    ]
    return [{key: row[key] for key in _KEPT if key in row} for row in rows if row["unit"] == "x"]


def compare(
    recorded: list[dict[str, Any]], measured: list[dict[str, Any]]
) -> tuple[list[str], bool]:
    """Compare line by line; returns a table's lines, and whether any ratio has become worse."""
    before = {row["case"]: row["value"] for row in recorded}
    lines, is_worse = [], False
    for row in measured:
        old = before.get(row["case"])
        if old is None:
            lines.append(f"new    {row['value']:6.3f}           {row['case']}")
            continue
        limit = old * (1 + MARGIN)
        verdict = "ok"
        if row["value"] > limit:
            verdict = "WORSE" if min(row["spread"]) > limit else "noisy"
        is_worse |= verdict == "WORSE"
        lines.append(f"{verdict:6s} {row['value']:6.3f} (was {old:.3f}) {row['case']}")
    return lines, is_worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the file anew")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not options.record and not FILE.exists():
        print(f"bench-check: there is no {FILE.name}: record it with --record.", file=sys.stderr)
        return 1
    with num_threads(1):
        measured = measure(options.repeats)
    if options.record:
        text = ",\n".join(json.dumps(row) for row in measured)
        FILE.write_text(f"[\n{text}\n]\n")
        return 0
    lines, is_worse = compare(json.loads(FILE.read_text()), measured)
    print(*lines, sep="\n")
    print(f"margin {MARGIN:.0%}: {'a ratio has become worse' if is_worse else 'nothing is worse'}")
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
