"""Models by name."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from selectconv.checks import check_choice, check_count, check_flag
from selectconv.errors import BadType, BadValue
from selectconv.lab.zoo import densenet, resnet
from selectconv.lab.zoo.blocks import ModelOptions

STEMS = ("cifar", "tiny", "imagenet")
REALLOCS = ("pointwise", "all", "none", "pointwise-only")
# Each takes `ModelOptions`, and what else `create_model` is to accept by name.
_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (
        densenet.densenet40,
        densenet.densenet100,
        densenet.densenet121,
        densenet.densenet_bc190,
        densenet.condensenet182,
        resnet.resnet164,
        resnet.resnet50,
        resnet.resnext29,
    )
}


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
        stem: the first layers: "cifar" (32x32 and smaller), "tiny" (the same with a doubled first
            stride) or "imagenet" (7x7 of stride 2, then max pooling). None: the model's own.
        selective: whether to use selective convs. The first conv stays plain.
        realloc: which selective convs re-allocate: 1x1 convs only ("pointwise", as the authors ran
            it), "all" (as the paper's text says), or "none" (for compression). With "all", the
            grouped convs of ResNeXt and CondenseNet are selective, too; otherwise they are plain.
            With "pointwise-only", 1x1 convs re-allocate and all others are plain; use it with a
            large gamma, which would close more and more slots of convs that cannot re-open them.
        **kw: passed to the model's builder, such as `growth_rate` and `units` of DenseNets, `width`
            and `blocks` of ResNets.

    Raises:
        TypeError, ValueError: an argument is not accepted.

    Example:
        >>> model = create_model("densenet40")
        >>> sum(p.numel() for p in model.parameters())
        211978
    """
    builder = _BUILDERS[check_choice("name", name, list_models())]
    num_classes = check_count("num_classes", num_classes, 1)
    in_channels = check_count("in_channels", in_channels, 1)
    if stem is not None:
        check_choice("stem", stem, STEMS)
    check_choice("realloc", realloc, REALLOCS)
    is_selective = check_flag("selective", selective)
    options = ModelOptions(num_classes, in_channels, stem, realloc if is_selective else None)
    parameters = inspect.signature(builder).parameters
    _, *accepted = parameters
    for key, value in kw.items():
        if key not in accepted:
            raise BadType(
                f"`{name}` has no argument {key!r}; besides the common ones it takes "
                f"{', '.join(accepted)}."
            )
        usual = parameters[key].default
        if isinstance(usual, tuple) and not isinstance(value, tuple | list):
            raise BadType(f"`{key}` must be a list, such as {list(usual)}; got {value!r}.")
    try:
        return builder(options, **kw)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise BadValue(
            f"`{name}` does not fit in memory with num_classes={num_classes}, "
            f"in_channels={in_channels}, {kw}."
        ) from error
