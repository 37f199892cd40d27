"""A verb's parser: what it refuses, it names in one line together with what is accepted.

Importing this file imports nothing but the standard library: `--help` answers at once.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from selectconv.checks import check_choice
from selectconv.errors import UsageError

Examples = Sequence[tuple[str, str]]  # a command, and what it is for


class Argument(NamedTuple):
    """An argument of a verb.

    Attributes:
        name: of the argument, or of the flag.
        help: its line in the verb's help.
        options: the others of argparse's `add_argument`.
        section: the title of `--help` that it stands under; empty: the usual one.
    """

    name: str
    help: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    section: str = ""


def switch(name: str, help: str) -> Argument:
    """Declare a flag that is given or not."""
    return Argument(name, help, {"action": "store_true"})


def count(name: str, help: str, default: int | None = None) -> Argument:
    """Declare a flag for a whole number of at least 1."""
    return Argument(name, help, {"type": _read_count, "default": default, "metavar": "N"})


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


# What the verbs about one run share.
DIR = Argument("dir", "folder of the run")
BEST = switch("--best", "use the weights with the lowest test error")
JSON = switch("--json", "print JSON, one line per row")


class Parser(argparse.ArgumentParser):
    """The parser of one verb.

    Args:
        verb: its name.
        description: what it does, in one line.
        arguments: what it takes.
        examples: the end of its help.
    """

    def __init__(
        self, verb: str, description: str, arguments: Sequence[Argument], examples: Examples
    ) -> None:
        super().__init__(
            prog=f"selectconv {verb}",
            description=description[0].upper() + description[1:] + ".",
            epilog=list_commands("examples:", examples),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sections: dict[str, Any] = {"": self}
        for name, help, options, title in arguments:
            if title not in sections:
                sections[title] = self.add_argument_group(title)
            sections[title].add_argument(name, help=help.replace("%", "%%"), **options)

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


def list_commands(title: str, examples: Examples) -> str:
    """Return a title, and a line for each command with what it is for."""
    width = max(len(command) for command, _ in examples)
    return "\n".join([title, *(f"  {command:{width}}  {text}" for command, text in examples)])
