"""The `selectconv` command; `python -m selectconv` is the same."""

import sys
from collections.abc import Sequence

from selectconv.lab.cli.signals import leave_at_once

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if arguments is None:  # this process is the command
        leave_at_once()
    from selectconv.lab.cli.main import main as answer

    return answer(arguments)


if __name__ == "__main__":
    sys.exit(main())
