"""A verb's parser: what it refuses, it names in one line together with what is accepted.

Values are checked by the code that uses them, so a flag, a line of YAML and an argument of Python
are refused with the same words; the parser reads them as YAML and looks at nothing but the form.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from selectconv.errors import UsageError


class Parser(ArgumentParser):
    """The parser of one verb.

    Args:
        verb: its name.
        description: what it does, in one line.
    """

    def __init__(self, verb: str, description: str) -> None:
        self.verb = verb
        self.flags: list[str] = []
        self.needed: list[argparse.Action] = []
        super().__init__(
            prog=f"selectconv {verb}",
            description=description,
            exit_on_error=False,
            allow_abbrev=False,
            formatter_class=argparse.HelpFormatter,  # jsonargparse's repeats types
        )

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag or a positional argument; both are remembered for messages."""
        action: argparse.Action = super().add_argument(*names, **options)
        self.flags += [name for name in action.option_strings if name.startswith("--")]
        if not action.option_strings and action.required:
            action.required = False  # `read` says more about what is missing
            self.needed.append(action)
        return action

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the words after the verb.

        Raises:
            UsageError: a word is unknown, a value is missing, or an argument is.
        """
        for word in words:
            flag = word.partition("=")[0].partition(".")[0]  # --model-options.growth_rate=8
            if flag.startswith("--") and flag not in ("--", *self.flags):
                raise UsageError(self._describe_unknown(flag))
        try:
            options = self.parse_args(words)
        except ArgumentError as error:
            raise UsageError(f"{error}; `{self.prog} --help` lists what is accepted.") from error
        for action in self.needed:
            if options[action.dest] in (None, []):
                raise UsageError(f"`{self.verb}` needs `{action.dest}`: {action.help}.")
        return options

    def _describe_unknown(self, flag: str) -> str:
        names = {known.removeprefix("--"): known for known in self.flags}
        near = difflib.get_close_matches(flag.strip("-").replace("_", "-"), names, n=1)
        accepted = f"accepted are {', '.join(sorted(self.flags))}."
        hint = f"did you mean {names[near[0]]}?" if near else accepted
        return f"unknown setting {flag!r}; {hint}"


def check_whole(options: Namespace, name: str, least: int) -> None:
    """Check that an option is a whole number of at least `least`."""
    from selectconv.train.settings import whole

    whole(least)(name, options[name])
