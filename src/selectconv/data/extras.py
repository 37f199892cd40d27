"""Packages that only some data sets need: imported when needed, named when missing."""

import importlib
from typing import Any

from selectconv.errors import DataError

_INSTALL_NAMES = {"PIL": "Pillow", "sklearn": "scikit-learn"}


def import_extra(module: str, purpose: str) -> Any:
    """Return a module of the `train` extra.

    Args:
        module: dotted name, such as "PIL.Image".
        purpose: what needs it; the start of the error's sentence.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = _INSTALL_NAMES.get(top, top)
        raise DataError(f"{purpose} needs {package}: install selectconv[train].") from error
