"""The command itself: its verbs and its exit codes; no traceback reaches a user.

0: done. 1: the job failed. 2: what the user typed or passed in is wrong. Either way stderr has one
line that says what is wrong and what is accepted. A verb is imported when it is needed.
"""

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import selectconv
from selectconv.checks import suggest
from selectconv.errors import (
    ConversionError,
    RunError,
    SelectConvError,
    SelectConvWarning,
    UsageError,
)
from selectconv.lab.cli.examples import show_examples, show_start

if TYPE_CHECKING:
    from selectconv.lab.cli.parser import Parser

# The module of each verb, and its line in `selectconv --help`.
VERBS = {
    "train": ("train", "train a network, plain or selective, as in the paper"),
    "eval": ("evaluate", "test a run's last (or best) weights"),
    "compress": ("compress", "write a run's network as a smaller plain model"),
    "export": ("export", "write a run's network as ONNX"),
    "report": ("report", "write a page with tables and figures of one or more runs"),
    "reproduce": (
        "reproduce",
        "run the experiments behind a table of the paper, and write the table",
    ),
    "data": ("data", "list the data sets, or fetch one"),
    "models": ("models", "list the networks, with their sizes and the paper's"),
    "bench": (
        "bench",
        "measure the speed of training steps, allocation, inference or the data pipeline",
    ),
}

# What the system says of names that no file can have.
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if arguments is None:
        warnings.showwarning = partial(show_warning, otherwise=warnings.showwarning)
        try:
            return _answer(sys.argv[1:])
        finally:
            _flush()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _answer(arguments)
    finally:  # a training that failed ignores both, and this process goes on
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _answer(words: Sequence[str]) -> int:
    """Do what the words say; what goes wrong becomes one line and an exit code."""
    try:
        return _run(list(words))
    except (UsageError, ConversionError) as error:
        return complain(2, str(error))
    except SelectConvError as error:  # before ValueError, which some of them are as well
        return complain(1, str(error))
    except (TypeError, ValueError) as error:
        if os.environ.get("SELECTCONV_DEBUG"):
            raise
        return complain(2, str(error))
    except KeyboardInterrupt as error:
        return complain(130, str(error) or "interrupted.")
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("SELECTCONV_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _BAD_NAMES:
            return complain(2, f"{error.filename} cannot be a file or folder: {error.strerror}.")
        text = f"{type(error).__name__}: {error}"
        return complain(1, f"{text} (SELECTCONV_DEBUG=1 shows the traceback)")


def _flush() -> None:
    """Write out what was printed: left to Python, a failure would end the process with code 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # there, the reader of our output has left
            complain(1, f"the output cannot be written: {error.strerror}.")
        raise SystemExit(1) from None


def _run(words: list[str]) -> int:
    """Do what the first word says."""
    if not words:
        print(show_start(), flush=True)
        raise UsageError(f"a verb is missing: one of {', '.join(VERBS)}.")
    first, *rest = words
    if first == "--version":
        print(f"selectconv {selectconv.__version__}")
        return 0
    if first in ("-h", "--help"):
        print(_describe_verbs())
        raise SystemExit(0)
    if first not in VERBS:
        hint = suggest(first, VERBS)
        raise UsageError(f"{first!r} is not a verb; accepted are {', '.join(VERBS)}.{hint}")
    module = _load(first)
    return int(module.run(build_parser(first).read(rest)))


def build_parser(verb: str) -> "Parser":
    """Build the parser of a verb."""
    module = _load(verb)
    from selectconv.lab.cli.parser import Parser

    parser = Parser(verb, VERBS[verb][1], show_examples(verb))
    module.add_arguments(parser)
    return parser


def complain(code: int, message: str) -> int:
    """Print on stderr, in one line, what is wrong."""
    line = " ".join(message.split())
    print(f"selectconv: {line}", file=sys.stderr)
    return code


def show_warning(
    message: Warning | str,
    category: type[Warning],
    *where: Any,
    otherwise: Callable[..., object],
) -> None:
    """Print a warning of ours in one line; the others as Python does."""
    if issubclass(category, SelectConvWarning):
        complain(0, f"warning: {message}")
    else:
        otherwise(message, category, *where)


def _load(verb: str) -> Any:
    """Import a verb's module.

    Raises:
        RunError: a package of the extra `train` is not installed.
    """
    try:
        return import_module(f"selectconv.lab.cli.{VERBS[verb][0]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "selectconv":
            raise
        raise RunError(
            f"the command line needs {missing}: pip install 'selectconv[train]'"
        ) from error


def _describe_verbs() -> str:
    width = max(map(len, VERBS)) + 2
    return "\n".join(
        [
            "usage: selectconv [-h] [--version] VERB ...",
            "",
            "Convolutional networks that use the parameters they have.",
            "",
            "verbs:",
            *(f"  {name:{width}}{text}" for name, (_, text) in VERBS.items()),
            "",
            "options:",
            f"  {'-h, --help':{width + 2}}show this help",
            f"  {'--version':{width + 2}}show the version",
            "",
            "`selectconv VERB --help` lists the options of a verb, with examples;",
            "`selectconv` alone shows how to begin.",
        ]
    )
