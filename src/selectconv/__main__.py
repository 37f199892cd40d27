"""The `selectconv` command."""

import argparse
import sys
from collections.abc import Sequence

from selectconv import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="selectconv",
        description="Selective convolutions for PyTorch. The package is used from Python: "
        "`import selectconv as sc`.",
    )
    parser.add_argument("--version", action="version", version=f"selectconv {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
