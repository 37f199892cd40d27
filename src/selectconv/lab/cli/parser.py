"""A verb's parser: what it refuses, it names in one line together with what is accepted.

Values are checked by the code that uses them, so a flag, a line of YAML and an argument of Python
are refused with the same words; the parser reads them as YAML and looks at nothing but the form.
"""

import argparse
from collections.abc import Sequence

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from selectconv.checks import nearest
from selectconv.errors import UsageError
from selectconv.lab.train.settings import whole


class Parser(ArgumentParser):
    """The parser of one verb.

    Args:
        verb: its name.
        description: what it does, in one line.
        examples: the end of its help.
    """

    def __init__(self, verb: str, description: str, examples: str) -> None:
        self.verb = verb
        super().__init__(
            prog=f"selectconv {verb}",
            description=description[0].upper() + description[1:] + ".",
            epilog=examples,
            exit_on_error=False,
            allow_abbrev=False,
            # jsonargparse's repeats types and defaults.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @property
    def flags(self) -> list[str]:
        """The flags that are accepted."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the words after the verb.

        Raises:
            UsageError: a word is unknown, a value is missing, or an argument is.
        """
        for word in words:
            flag = word.partition("=")[0].partition(".")[0]  # --model-options.growth_rate=8
            if flag.startswith("--") and flag not in ("--", *self.flags):
                raise UsageError(self._describe_unknown(flag))
        needed = [action for action in self._actions if _is_needed(action)]
        for action in needed:
            action.required = False  # below, more is said about what is missing
        try:
            options = self.parse_args(words)
        except ArgumentError as error:
            raise UsageError(f"{error}; `{self.prog} --help` lists what is accepted.") from error
        for action in needed:
            if options[action.dest] in (None, []):
                raise UsageError(f"`{self.verb}` needs `{action.dest}`: {action.help}.")
        return options

    def _describe_unknown(self, flag: str) -> str:
        names = {known.removeprefix("--"): known for known in self.flags}
        near = nearest(flag.strip("-").replace("_", "-"), names)
        accepted = f"accepted are {', '.join(sorted(self.flags))}."
        hint = f"did you mean {names[near]}?" if near else accepted
        return f"unknown setting {flag!r}; {hint}"


def _is_needed(action: argparse.Action) -> bool:
    return not action.option_strings and action.required


def check_whole(options: Namespace, name: str, least: int) -> None:
    """Check that an option is a whole number of at least `least`."""
    whole(least)(name, options[name])
