"""The command: `python -m soak NAME [NAME ...] [--seed N] [--count N]`; without names: all.

`summary` writes the table of soak/CAMPAIGNS.md from the results. `architectures`, which is not
among "all", takes the CNNs of timm through all steps and writes soak/ARCHITECTURES.md;
`architectures_quick` leaves out ONNX.
"""

import argparse
import sys

from soak import architectures
from soak.driver import WRONG, fill_page, load_campaign, run_campaign, run_trial
from soak.summary import CAMPAIGNS, PAGE, describe_results

OF_TIMM = ("architectures", "architectures_quick")


def main() -> int:
    """Run campaigns; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join((*CAMPAIGNS, 'summary', *OF_TIMM))}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--count", type=int, help="trials per campaign (default: its own)")
    parser.add_argument("--trial", type=int, help="carry out this one alone, and print its row")
    parser.add_argument("--again", action="store_true", help="repeat trials that ended wrong")
    options = parser.parse_args()
    names = options.names or [*CAMPAIGNS, "summary"]
    known = (*CAMPAIGNS, "summary", *OF_TIMM)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return 1 if sum(carry_out(name, options) for name in names) else 0


def carry_out(name: str, options: argparse.Namespace) -> int:
    """Run one campaign, or one trial of it; returns how many trials went wrong."""
    if name == "summary":
        fill_page(PAGE, "results", describe_results(options.seed))
        return 0
    if options.trial is not None:
        row = run_trial(name, options.seed, options.trial)
        print(*(f"{key}: {value}" for key, value in row.items()), sep="\n")
        return int(row["how"] in WRONG)
    campaign = load_campaign(name)
    count = options.count or campaign.COUNT
    rows = run_campaign(name, options.seed, range(count), again=options.again)
    if name in OF_TIMM:
        fill_page(architectures.PAGE, "steps", architectures.describe_steps())
    return sum(row["how"] in WRONG for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
