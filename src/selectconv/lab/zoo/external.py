"""Networks from outside the zoo: `timm:NAME`, or `package.module:function` of the user's own."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from selectconv.checks import check_choice, suggest
from selectconv.errors import BadType, BadValue
from selectconv.extras import import_extra
from selectconv.lab.zoo.registry import list_models


def is_external(name: str) -> bool:
    """Return whether a model's name points outside the zoo."""
    return ":" in name


def check_model_name(name: str) -> str:
    """Check the form of a model's name; whether it exists outside the zoo is not looked up.

    Raises:
        TypeError, ValueError: it is neither a name of the zoo nor one of the other two forms.

    Example:
        >>> check_model_name("timm:resnet18")
        'timm:resnet18'
    """
    if not isinstance(name, str):
        raise BadType(f"`model` must be a name, got {name!r}.")
    if not is_external(name):
        try:
            return check_choice("model", name, list_models())
        except ValueError as error:
            raise BadValue(f"{error} Or timm:NAME, or package.module:function.") from None
    place, _, function = name.partition(":")
    if not function or not all(word.isidentifier() for word in place.split(".")):
        raise BadValue(
            "`model` must be a name of the zoo, timm:NAME, or package.module:function; "
            f"got {name!r}."
        )
    return name


def build_external(
    name: str, *, num_classes: int, in_channels: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build a plain network that is not of the zoo.

    Args:
        name: `timm:NAME`, or `package.module:function`, found as Python finds modules, the current
            folder included. The function is called with `num_classes` and `in_channels`.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.
        options: further keyword arguments.

    Raises:
        ValueError: there is no such network, or what was built is not a module.
    """
    place, _, function = name.partition(":")
    if place == "timm":
        build = partial(_find_in_timm(function), in_chans=in_channels)
    else:
        build = partial(_find_function(place, function), in_channels=in_channels)
    try:
        model = build(num_classes=num_classes, **options)
    except Exception as error:  # of code that is not ours
        raise BadValue(
            f"`model` {name!r} must accept `num_classes`, `in_channels` (timm: `in_chans`) and the "
            f"model options {sorted(options)}, and return an nn.Module; calling it failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise BadValue(f"`model` {name!r} must return an nn.Module, got {type(model).__name__}.")
    return model


def _find_in_timm(name: str) -> Callable[..., object]:
    try:
        timm = import_extra("timm", f"`model` timm:{name}", "timm", error=ValueError)
    except RuntimeError as error:  # of torchvision, which timm imports
        raise BadValue(
            f"`model` timm:{name} needs timm, which cannot be imported here ({error}): install the "
            "torchvision that belongs to this torch."
        ) from error
    if not timm.is_model(name):
        hint = suggest(name, timm.list_models())
        raise BadValue(f"`model`: timm {timm.__version__} has no network {name!r}.{hint}")
    return partial(timm.create_model, name)


def _find_function(place: str, function: str) -> Callable[..., object]:
    if os.getcwd() not in sys.path:  # the console script's path begins with its own folder
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(place)
    except Exception as error:  # in a module that is not ours
        raise BadValue(
            f"`model`: cannot import {place!r} from the current folder or the installed packages: "
            f"{type(error).__name__}: {error}"
        ) from error
    build: Callable[..., object] | None = getattr(module, function, None)
    if not callable(build):
        hint = suggest(function, [name for name, value in vars(module).items() if callable(value)])
        raise BadValue(f"`model`: {place} has no function {function!r}.{hint}")
    return build
