"""The `selectconv` command; `python -m selectconv` is the same."""

import sys

from selectconv.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
