"""Optional packages: imported when they are needed, named when they are missing."""

import importlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What people call a package, where that is not the name of its module.
_TITLES = {
    "PIL": "Pillow",
    "ray": "Ray",
    "sklearn": "scikit-learn",
    "torch_pruning": "Torch-Pruning",
}


@contextmanager
def needing(
    package: str,
    purpose: str,
    install: str = "selectconv[train]",
    *,
    error: type[Exception] = ModuleNotFoundError,
) -> Iterator[None]:
    """Say what to install if an import in the block fails.

    Args:
        package: the top-level module that may be missing.
        purpose: what needs it: the start of the message.
        install: what pip installs.
        error: the class of the error to raise.

    Raises:
        Exception: of the class `error`: the package is missing or broken. With an `ImportError`, a
            broken package's own error is raised instead.

    Example:
        >>> with needing("no_such_package", "This example", "selectconv[test]"):
        ...     import no_such_package
        Traceback (most recent call last):
        ModuleNotFoundError: This example needs no_such_package: pip install 'selectconv[test]'.
    """
    try:
        yield
    except ImportError as problem:
        title = _TITLES.get(package, package)
        if isinstance(problem, ModuleNotFoundError) and _top(problem.name) == package:
            message = f"{purpose} needs {title}: pip install {shlex.quote(install)}."
        elif issubclass(error, ImportError):
            raise
        else:
            reason = " ".join(str(problem).split())
            message = f"{purpose} needs {title}, which cannot be imported: {reason}."
        raised = error(message)
        if isinstance(raised, ImportError):
            raised.name = package
        raise raised from problem


def import_extra(
    module: str,
    purpose: str,
    install: str = "selectconv[train]",
    *,
    error: type[Exception] = ModuleNotFoundError,
) -> Any:
    """Return an optional module, given by its dotted name; the rest is as for `needing`."""
    with needing(_top(module), purpose, install, error=error):
        return importlib.import_module(module)


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]
