"""The paper's printed figures of its networks, beside those of the zoo."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from selectconv.checks import check_choice
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.zoo.registry import create_model


@dataclass(frozen=True)
class PaperFigures:
    """What the paper prints about a network, and for which input.

    Attributes:
        params: parameters as printed, shift biases not included.
        flops: FLOPs as printed; None: the paper has none.
        image_size: height and width of the images.
        num_classes: of the data set that the figures are for.
        realloc: of the paper's selective network, as for `create_model`.
        note: what to know before comparing.
    """

    params: str
    flops: str | None = None
    image_size: int = 32
    num_classes: int = 10
    realloc: str = "pointwise"
    note: str = ""


PAPER = {
    "densenet40": PaperFigures("0.21M"),
    "densenet100": PaperFigures("1.00M"),
    "resnet164": PaperFigures("1.66M"),
    "resnext29": PaperFigures("33.8M"),
    "densenet_bc190": PaperFigures(
        "25.6M",
        "9,388M",
        realloc="none",
        note="selective: de-allocation only; the paper's FLOPs count more than multiply-adds",
    ),
    "condensenet182": PaperFigures(
        "4.20M",
        "513M",
        realloc="none",
        note="selective: de-allocation only; the paper's figures are after condensing",
    ),
    "densenet121": PaperFigures("7.98M", image_size=224, num_classes=1000),
    "resnet50": PaperFigures("22.8M", image_size=224, num_classes=1000),
}
"""Tables 1 and 2 (CIFAR-10) and 3 (ImageNet), by the zoo's names and in the paper's order."""


@dataclass(frozen=True)
class ModelRow:
    """A network of the zoo beside the paper's figures.

    Attributes:
        name: as for `create_model`.
        params: parameters of the plain network.
        macs: multiply-adds of its convs and its classifier for one image.
        selective_params: parameters of the selective network with nothing closed.
        shift_biases: those among them that are shifts.
        paper_params: as printed.
        paper_flops: as printed, or None.
        note: what to know before comparing.
    """

    name: str
    params: int
    macs: int
    selective_params: int
    shift_biases: int
    paper_params: str
    paper_flops: str | None
    note: str


def models_table(names: Sequence[str] = tuple(PAPER)) -> list[ModelRow]:
    """Count networks of the paper, each for its own images; all of them in a few seconds.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> [row] = models_table(["densenet40"])
        >>> row.params, row.selective_params, row.paper_params
        (211978, 216514, '0.21M')
    """
    return [_count_row(name, PAPER[check_choice("name", name, PAPER)]) for name in names]


def _count_row(name: str, paper: PaperFigures) -> ModelRow:
    with torch.device("meta"):  # shapes only: no memory, no random numbers drawn
        plain = create_model(name, num_classes=paper.num_classes)
        selective = create_model(
            name, num_classes=paper.num_classes, selective=True, realloc=paper.realloc
        )
    return ModelRow(
        name=name,
        params=count_params(plain),
        macs=count_macs(plain, (3, paper.image_size, paper.image_size)),
        selective_params=count_params(selective),
        shift_biases=_count_shift_biases(selective),
        paper_params=paper.params,
        paper_flops=paper.flops,
        note=paper.note,
    )


def _count_shift_biases(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith(".shift"))
