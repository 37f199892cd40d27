"""How a setting of `train` is declared: once, as a field of `TrainConfig`.

The flag, its help, what is accepted and the report's grouping follow from the declaration.
Importing this file does not import torch, so that `selectconv train --help` is quick: names that
live beside networks and data are imported when a value is checked.
"""

from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal

from selectconv.checks import check_choice, check_count, check_seed

Check = Callable[[str, Any], object]
Group = Literal["task", "training", "tuning", "selection", "aside"]


@dataclass(frozen=True)
class Setting:
    """What is declared about a setting besides its name, its type and its default.

    Attributes:
        help: one line for `--help`, without the default.
        check: called with the name and a value; raises TypeError or ValueError.
        group: `task` (network and data), `training`, `tuning` (each row of a comparison may have
            its own best value), `selection` (how channels are selected, likewise) or `aside` (a
            result does not depend on it, or not by intention).
        none_word: how None is written in flags and files, if it is a choice of its own; otherwise
            a missing value or null means None.
    """

    help: str
    check: Check
    group: Group = "training"
    none_word: str | None = None


def setting(
    help: str,
    check: Check,
    *,
    group: Group = "training",
    default: Any = MISSING,
    none_word: str | None = None,
) -> Any:
    """Declare a field of `TrainConfig`; without a default, `recipes.yaml` must have a value."""
    metadata = {"setting": Setting(help, check, group, none_word)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def declaration(declared: Field[Any]) -> Setting:
    """Return what was declared about a field."""
    found: Setting = declared.metadata["setting"]
    return found


def default_of(declared: Field[Any]) -> Any:
    """Return a field's own default; MISSING if it has none."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def whole(least: int, words: str = "a whole number") -> Check:
    """Accept whole numbers of at least `least`."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be {words}, got {value!r}.")
        check_count(name, value, least)

    return check


def seeds(name: str, value: Any) -> None:
    """Accept seeds of torch's generators."""
    whole(0)(name, value)
    check_seed(name, value)


def choice(choices: Callable[[], Collection[str]]) -> Check:
    """Accept the names that a function returns."""

    def check(name: str, value: Any) -> None:
        check_choice(name, value, list(choices()))

    return check


def optional(check: Check) -> Check:
    """Accept None as well."""

    def check_given(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_given


def instance(kind: type, words: str) -> Check:
    """Accept values of one type."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"`{name}` must be {words}, got {value!r}.")

    return check


truth = instance(bool, "true or false")


def model_name(name: str, value: Any) -> None:
    """Accept the forms of a network's name."""
    from selectconv.lab.zoo.external import check_model_name

    check_model_name(value)


def dataset_name(name: str, value: Any) -> None:
    """Accept data sets by name, and folders of images."""
    from selectconv.lab.data.registry import check_dataset_name

    check_dataset_name(value)


def damage_names() -> Collection[str]:
    """Return the measures of damage."""
    from selectconv.core.damage import DAMAGES

    return DAMAGES
