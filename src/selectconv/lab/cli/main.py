"""The command itself: its verbs and its exit codes; no traceback reaches a user.

0: done. 1: the job failed. 2: what the user typed or passed in is wrong. 130: interrupted. Either
way stderr has one line that says what is wrong and what is accepted. A verb is the file of its name
beside this one, imported when it is needed, and an entry in `VERBS`.
"""

import errno
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import selectconv
from selectconv.checks import check_choice
from selectconv.errors import (
    BadType,
    BadValue,
    ConversionError,
    RunError,
    SelectConvError,
    SelectConvWarning,
    UsageError,
)
from selectconv.lab.cli import signals
from selectconv.lab.cli.parser import Parser, list_commands

# Each verb's line in `selectconv --help`.
VERBS = {
    "train": "train a network, plain or selective, as in the paper",
    "eval": "test a run's last (or best) weights",
    "compress": "write a run's network as a smaller plain model",
    "export": "write a run's network as ONNX",
    "report": "write a page with tables and figures of one or more runs",
    "reproduce": "run the experiments behind a table of the paper, and write the table",
    "data": "list the data sets, or fetch one",
    "models": "list the networks, with their sizes and the paper's",
    "bench": "measure the speed of training steps, allocation, inference or the data pipeline",
}
_HELP = f"""\
usage: selectconv [-h] [--version] VERB ...

Convolutional networks that use the parameters they have.

{list_commands("verbs:", list(VERBS.items()))}

`selectconv VERB --help` lists the options of a verb, with examples;
`selectconv` alone shows how to begin."""
_START = list_commands(
    "selectconv trains networks that use the parameters they have. Begin with:",
    [
        (
            "selectconv train --data digits --gamma 0.05 --grace 1 --epochs 10",
            "a first run, about a minute",
        ),
        ("selectconv train --help", "the settings, with examples"),
        ("selectconv data list", "the data sets; imagefolder:DIR is for your own images"),
        ("selectconv models", "the networks"),
        ("selectconv --help", "all verbs"),
    ],
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if arguments is None:
        warnings.formatwarning = partial(_format_warning, otherwise=warnings.formatwarning)
    with signals.answered_by(signals.stop):
        code = _answer(sys.argv[1:] if arguments is None else arguments)
        return _flush() or code


def _answer(words: Sequence[str]) -> int:
    """Do what the words say; what goes wrong becomes one line and an exit code."""
    try:
        _run(*words)
        return 0
    except SystemExit as end:  # argparse has printed a verb's help
        return int(bool(end.code))
    except BrokenPipeError:  # the reader of our output has left
        return 1
    except KeyboardInterrupt as error:
        return complain(130, str(error) or "interrupted.")
    except (UsageError, ConversionError, BadValue, BadType) as error:
        return complain(2, str(error))
    except SelectConvError as error:
        return complain(1, str(error))
    except Exception as error:
        if os.environ.get("SELECTCONV_DEBUG"):
            raise
        if isinstance(error, TypeError | ValueError):
            return complain(2, str(error))
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return complain(2, f"{error.filename} cannot be a file or folder: {error.strerror}.")
        text = f"{type(error).__name__}: {error}"
        return complain(1, f"{text} (SELECTCONV_DEBUG=1 shows the traceback)")


def _run(first: str | None = None, *rest: str) -> None:
    """Do what the first word says."""
    if first is None:
        print(_START, flush=True)
        raise UsageError(f"a verb is missing: one of {', '.join(VERBS)}.")
    version = f"selectconv {selectconv.__version__}"
    texts = {"--version": version, "-h": _HELP, "--help": _HELP}
    if first in texts:
        print(texts[first])
    else:
        check_choice("verb", first, VERBS)
        with _told_what_to_install():  # a verb imports what it needs as it runs, too
            _load(first).run(build_parser(first).read(rest))


def build_parser(verb: str) -> Parser:
    """Build the parser of a verb."""
    module = _load(verb)
    return Parser(verb, VERBS[verb], module.ARGUMENTS, module.EXAMPLES)


def _load(verb: str) -> Any:
    return import_module(f"selectconv.lab.cli.{verb}")


@contextmanager
def _told_what_to_install() -> Iterator[None]:
    """Raise a RunError for a package of the extra `train` that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "selectconv").split(".")[0]
        if missing == "selectconv":
            raise
        raise RunError(
            f"the command line needs {missing}: pip install 'selectconv[train]'"
        ) from error


def complain(code: int, message: str) -> int:
    """Print on stderr, in one line, what is wrong."""
    print(f"selectconv: {' '.join(message.split())}", file=sys.stderr)
    return code


def _format_warning(
    message: Warning | str, category: type[Warning], *where: Any, otherwise: Any
) -> str:
    """Return a warning of ours as one line; the others as Python writes them."""
    if issubclass(category, SelectConvWarning):
        return f"selectconv: warning: {' '.join(str(message).split())}\n"
    return str(otherwise(message, category, *where))


def _flush() -> int:
    """Write out what was printed: left to Python, a failure would end the process with code 120."""
    try:
        sys.stdout.flush()
        return 0
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has left
            return 1
        return complain(1, f"the output cannot be written: {error.strerror}.")
