"""The `selectconv` command; `python -m selectconv` is the same."""

import sys
from collections.abc import Sequence

from selectconv import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:  # works without the extra
        print(f"selectconv {__version__}")
        return 0
    try:
        from selectconv.cli import main as command
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "selectconv":
            raise
        line = f"the command line needs {missing}: pip install 'selectconv[train]'"
        print(f"selectconv: {line}", file=sys.stderr)
        return 1
    return command.main(words)


if __name__ == "__main__":
    sys.exit(main())
