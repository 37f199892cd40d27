"""`selectconv models`: the zoo, its sizes beside the paper's printed figures."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.cli.output import print_rows
from selectconv.lab.cli.parser import JSON
from selectconv.lab.zoo import create_model

EXAMPLES = [("selectconv models", "the networks, with parameters and multiply-adds")]
ARGUMENTS = [JSON]


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


# Tables 1 and 2 (CIFAR-10) and 3 (ImageNet), by the zoo's names and in the paper's order.
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


def count_network(name: str, paper: PaperFigures) -> dict[str, Any]:
    """Count a network of the paper, for its own images.

    Returns:
        Its name; params and macs (of one image) of the plain network; selective_params with nothing
        closed, and shift_biases, those among them that are shifts; paper_params and paper_flops as
        printed; and a note.
    """
    with torch.device("meta"):  # shapes only: no memory, no random numbers drawn
        plain = create_model(name, num_classes=paper.num_classes)
        selective = create_model(
            name, num_classes=paper.num_classes, selective=True, realloc=paper.realloc
        )
    shifts = [p for name, p in selective.named_parameters() if name.endswith(".shift")]
    return {
        "name": name,
        "params": count_params(plain),
        "macs": count_macs(plain, (3, paper.image_size, paper.image_size)),
        "selective_params": count_params(selective),
        "shift_biases": sum(shift.numel() for shift in shifts),
        "paper_params": paper.params,
        "paper_flops": paper.flops,
        "note": paper.note,
    }


def run(options: Namespace) -> None:
    """Print the table, in a few seconds."""
    print_rows([count_network(name, paper) for name, paper in PAPER.items()], as_json=options.json)
