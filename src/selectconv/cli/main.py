"""The command itself: its verbs, its exit codes, and that no traceback reaches a user.

0: done. 1: the job failed. 2: what the user typed or passed in is wrong. Either way stderr has one
line that says what is wrong and what is accepted.
"""

import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from selectconv import __version__
from selectconv.cli import (
    bench,
    compress,
    data,
    evaluate,
    export,
    models,
    report,
    reproduce,
    train,
)
from selectconv.errors import SelectConvError, UsageError

VERBS = {
    "train": train,
    "eval": evaluate,
    "compress": compress,
    "export": export,
    "report": report,
    "reproduce": reproduce,
    "data": data,
    "models": models,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser().parse_args(words)
        verb = options.subcommand
        return int(VERBS[verb].run(options[verb]))
    except ArgumentError as error:
        return complain(2, explain(str(error), words))
    except (UsageError, TypeError, ValueError) as error:
        if os.environ.get("SELECTCONV_DEBUG"):
            raise
        return complain(2, str(error))
    except SelectConvError as error:
        return complain(1, str(error))
    except KeyboardInterrupt:
        return complain(1, "interrupted; a run goes on with --resume.")
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("SELECTCONV_DEBUG"):
            raise
        text = f"{type(error).__name__}: {error}"
        return complain(1, f"{text} (SELECTCONV_DEBUG=1 shows where)")


def build_parser() -> ArgumentParser:
    """Build the parser of all verbs."""
    parser = ArgumentParser(
        prog="selectconv",
        description="Convolutional networks that use the parameters they have.",
        exit_on_error=False,
        version=__version__,
    )
    verbs = parser.add_subcommands(required=True, metavar="VERB")
    for name, module in VERBS.items():
        verbs.add_subcommand(name, module.build_parser(), help=module.HELP)
    return parser


def complain(code: int, message: str) -> int:
    """Say in one line on stderr what is wrong."""
    line = " ".join(message.split())
    print(f"selectconv: {line}", file=sys.stderr)
    return code


def explain(message: str, words: list[str]) -> str:
    """Turn the parser's message into one line that names what is accepted."""
    unknown = re.search(r"unrecognized arguments: (\S+)|does not accept option '([^']+)'", message)
    if unknown:
        name = next(group for group in unknown.groups() if group)
        accepted = _flags(words)
        wanted = "--" + name.lstrip("-").split("=")[0].replace("_", "-")
        near = difflib.get_close_matches(wanted, accepted, n=1)
        hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join(accepted)}."
        return f"unknown setting {name!r}; {hint}"
    if "to be one of {" in message and "not provided" in message:  # it cuts long lists short
        return f"say what to do: one of {', '.join(VERBS)}."
    required = re.search(r"arguments are required: (\w+)\.(\w+)", message)
    if required and required[1] in VERBS:
        actions: list[Any] = VERBS[required[1]].build_parser()._actions
        what = next(action.help for action in actions if action.dest == required[2])
        return f"`{required[1]}` needs `{required[2]}`: {what}."
    key = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Given value|Got value): (.*)", message)
    if key and value:
        name = key[1].split(".")[-1]
        kinds = _kinds(words)
        wanted = kinds.get(name, "another type of value")
        return f"`{name}` must be {wanted}, got {value[1].strip()!r}."
    if "config" in message and "--config" in words[:-1]:
        file = words[words.index("--config") + 1]
        return f"{file} must be YAML with a setting a line, such as `epochs: 3`; {message}"
    return message


def _flags(words: list[str]) -> list[str]:
    verb = next((word for word in words if word in VERBS), None)
    if verb is None:
        return list(VERBS)
    actions: list[Any] = VERBS[verb].build_parser()._actions
    return sorted(flag for action in actions for flag in action.option_strings if flag[:2] == "--")


def _kinds(words: list[str]) -> dict[str, str]:
    verb = next((word for word in words if word in VERBS), None)
    return getattr(VERBS.get(verb or ""), "KINDS", {})
