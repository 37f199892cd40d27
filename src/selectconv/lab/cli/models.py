"""`selectconv models`: the zoo, its sizes beside the paper's figures."""

from argparse import Namespace

from selectconv.lab.cli.output import print_json
from selectconv.lab.cli.parser import JSON
from selectconv.lab.zoo.paper import models_table
from selectconv.tables import text_table

EXAMPLES = [("selectconv models", "the networks, with parameters and multiply-adds")]
_HEADS = ("model", "parameters", "paper", "multiply-adds", "paper's FLOPs", "selective", "shifts")
ARGUMENTS = [JSON]


def run(options: Namespace) -> None:
    """Print the table."""
    rows = models_table()
    if options.json:
        print_json(rows)
        return
    cells = [
        (
            row["name"],
            f"{row['params']:,}",
            row["paper_params"],
            f"{row['macs'] / 1e6:,.1f}M",
            row["paper_flops"] or "-",
            f"{row['selective_params']:,}",
            f"{row['shift_biases']:,}",
        )
        for row in rows
    ]
    print("Networks of the paper, 32x32 images (DenseNet-121, ResNet-50: 224x224)")
    print(text_table([_HEADS, *cells], right=range(1, len(_HEADS))))
    print(*(f"{row['name']}: {row['note']}" for row in rows if row["note"]), sep="\n")
