"""Checks of what users pass in: each error names the argument, the value and what is accepted.

Importing this file does not import torch: the command line checks its words before it needs torch.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Collection
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

from selectconv.errors import BadType, BadValue, SelectConvWarning


def as_plain(value: Any) -> Any:
    """Return NumPy's numbers, and tensors of one number without axes, as Python's own numbers."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a real number of Python's, True and False left out."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_fraction(name: str, value: float) -> float:
    """Return `value` as a float in [0, 1]."""
    return _check_number(name, value, "a number in [0, 1]", 1.0)


def check_share(name: str, value: float) -> float:
    """Return `value` as a float above 0, of at most 1."""
    accepted = "a number above 0 and at most 1"
    if (share := _check_number(name, value, accepted, 1.0)) == 0:
        raise BadValue(f"`{name}` must be {accepted}, got {value!r}.")
    return share


def check_gamma(name: str, value: float | str) -> float | str:
    """Return `value` as a float in [0, 1], or "auto"."""
    if isinstance(value, str) and value == "auto":
        return value
    return _check_number(name, value, "a number in [0, 1] or 'auto'", 1.0)


def check_non_negative(name: str, value: float) -> float:
    """Return `value` as a finite float that is not negative."""
    return _check_number(name, value, "a finite number of at least 0", sys.float_info.max)


def _check_number(name: str, value: Any, accepted: str, most: float) -> float:
    number = as_plain(value)
    if not is_number(number):
        raise BadType(f"`{name}` must be {accepted}, got {number!r}.")
    if not 0.0 <= number <= most:  # NaN fails this too
        raise BadValue(f"`{name}` must be {accepted}, got {number!r}.")
    return float(number)


def check_count(name: str, value: int, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`."""
    value = as_plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadType(f"`{name}` must be an integer of at least {minimum}, got {value!r}.")
    if value < minimum:
        raise BadValue(f"`{name}` must be at least {minimum}, got {value!r}.")
    return value


def check_seed(name: str, value: int) -> int:
    """Return `value` as an int that torch's generators take."""
    value = check_count(name, value, 0)
    if value >= 1 << 63:
        raise BadValue(f"`{name}` must be below 2^63, got {value!r}.")
    return value


def check_flag(name: str, value: bool) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise BadType(f"`{name}` must be True or False, got {value!r:.60}.")
    return value


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`; else name the nearest of them."""
    if isinstance(value, str) and value in choices:
        return value
    hint = suggest(value, choices)
    raise BadValue(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.{hint}")


def suggest(value: str, choices: Collection[str]) -> str:
    """Return " Did you mean ...?" with the nearest of `choices`, or nothing if none is near."""
    near = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_callable(name: str, value: Callable[..., Any]) -> None:
    """Check that `value` can be called."""
    if not callable(value):
        raise BadType(f"`{name}` must be a function, got {value!r}.")


def check_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Return `value` as a path."""
    if not isinstance(value, str | os.PathLike):
        raise BadType(f"`{name}` must be a path, got {type(value).__name__}.")
    if not os.fspath(value) or "\0" in os.fspath(value):
        raise BadValue(f"`{name}` must be a path, got {os.fspath(value)!r}.")
    return Path(value)


def warn(message: str) -> None:
    """Warn of something that a user can act on, at the line that called the package."""
    level, frame = 1, sys._getframe()
    # Decorators of torch stand between.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(
        ("selectconv.", "torch.")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SelectConvWarning, stacklevel=level)
