"""A verb's parser: what it refuses, it names in one line together with what is accepted.

Importing this file imports nothing but the standard library: `--help` answers at once.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from selectconv.checks import check_choice
from selectconv.errors import UsageError

Examples = Sequence[tuple[str, str]]  # a command, and what it is for


class Parser(argparse.ArgumentParser):
    """The parser of one verb.

    Args:
        verb: its name.
        description: what it does, in one line.
        examples: the end of its help.
    """

    def __init__(self, verb: str, description: str, examples: Examples) -> None:
        super().__init__(
            prog=f"selectconv {verb}",
            description=description[0].upper() + description[1:] + ".",
            epilog=list_commands("examples:", examples),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the verb.

        Raises:
            UsageError: a value or an argument is missing, or is one too many.
            ValueError: an unknown flag; the nearest one is named.
        """
        options, unknown = self.parse_known_args(words)
        for word in unknown:
            if word.startswith("--"):
                flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
                check_choice("flag", word.partition("=")[0], flags)
            self.error(f"unrecognized arguments: {word}")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}; `{self.prog} --help` lists what is accepted.")

    def add_flag(self, name: str, help: str) -> None:
        """Add a flag that is given or not."""
        self.add_argument(name, action="store_true", help=help)

    def add_count(self, name: str, help: str, default: int | None = None) -> None:
        """Add a flag for a whole number of at least 1."""
        self.add_argument(name, type=_read_count, default=default, metavar="N", help=help)


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def list_commands(title: str, examples: Examples) -> str:
    """Return a title, and a line for each command with what it is for."""
    width = max(len(command) for command, _ in examples)
    return "\n".join([title, *(f"  {command:{width}}  {text}" for command, text in examples)])
