"""The `selectconv` command; `python -m selectconv` is the same."""

import sys

from selectconv.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
