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
        Exception: of the class `error`: the package is missing or broken.

    Example:
        >>> with needing("no_such_package", "This example", "selectconv[test]"):
        ...     import no_such_package
        Traceback (most recent call last):
        ModuleNotFoundError: This example needs no_such_package: pip install 'selectconv[test]'.
    """
    try:
        yield
    except ImportError as problem:
        missing = problem.name if isinstance(problem, ModuleNotFoundError) else None
        if missing is not None and missing.partition(".")[0] == package:
            remedy = f": pip install {shlex.quote(install)}"
        else:
            remedy = f", which cannot be imported: {' '.join(str(problem).split())}"
        raise error(f"{purpose} needs {_TITLES.get(package, package)}{remedy}.") from problem


def import_extra(
    module: str,
    purpose: str,
    install: str = "selectconv[train]",
    *,
    error: type[Exception] = ModuleNotFoundError,
) -> Any:
    """Return an optional module, given by its dotted name; the rest is as for `needing`."""
    with needing(module.partition(".")[0], purpose, install, error=error):
        return importlib.import_module(module)
