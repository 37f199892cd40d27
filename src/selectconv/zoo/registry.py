"""Models by name."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from selectconv.checks import check_choice, check_count

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

STEMS = ("cifar", "tiny", "imagenet")
REALLOCS = ("pointwise", "all", "none")
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Builder) -> Builder:
    """Make a builder available to `create_model` under its own name."""
    assert builder.__name__ not in _BUILDERS
    _BUILDERS[builder.__name__] = builder
    return builder


def list_models() -> list[str]:
    """Return the names that `create_model` knows.

    Example:
        >>> "densenet40" in list_models()
        True
    """
    return sorted(_BUILDERS)


def create_model(
    name: str,
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    stem: str | None = None,
    selective: bool = False,
    realloc: str = "pointwise",
    **kw: Any,
) -> nn.Module:
    """Build a network of the paper.

    Args:
        name: one of `list_models()`.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.
        stem: "cifar" (32x32 and smaller), "tiny" (the same with a doubled first stride), "imagenet"
            (7x7 of stride 2, then max pooling); None: the model's own.
        selective: build it with selective convs; the first conv stays plain.
        realloc: which selective convs re-allocate: 1x1 convs only ("pointwise", as the authors ran
            it), "all" of them (as the paper's text says), or "none" (compression).
        **kw: passed to the model's builder.

    Raises:
        TypeError, ValueError: an argument that is not accepted.

    Example:
        >>> model = create_model("densenet40")
        >>> sum(p.numel() for p in model.parameters())
        211978
    """
    builder = _BUILDERS[check_choice("name", name, list_models())]
    check_count("num_classes", num_classes, 1)
    check_count("in_channels", in_channels, 1)
    if stem is not None:
        check_choice("stem", stem, STEMS)
    check_choice("realloc", realloc, REALLOCS)
    common = {
        "num_classes": num_classes,
        "in_channels": in_channels,
        "stem": stem,
        "realloc": realloc if selective else None,
    }
    accepted = [key for key in inspect.signature(builder).parameters if key not in common]
    for key in kw:
        if key not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no further arguments"
            raise TypeError(
                f"`{name}` has no argument {key!r}; besides the common ones it {takes}."
            )
    return builder(**common, **kw)
