"""`selectconv models`: the zoo, its sizes beside the paper's figures."""

from jsonargparse import Namespace
from rich.table import Table

from selectconv.lab.cli.console import print_lines, wide_console
from selectconv.lab.cli.parser import Parser
from selectconv.lab.zoo.paper import models_table


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON line per network")


def run(options: Namespace) -> int:
    """Print the table."""
    rows = models_table()
    if options.json:
        return print_lines(rows)
    table = Table(title="Networks of the paper, 32x32 images (DenseNet-121, ResNet-50: 224x224)")
    table.add_column("model")
    for head in ("parameters", "paper", "multiply-adds", "paper's FLOPs", "selective", "shifts"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['params']:,}",
            row["paper_params"],
            f"{row['macs'] / 1e6:,.1f}M",
            row["paper_flops"] or "-",
            f"{row['selective_params']:,}",
            f"{row['shift_biases']:,}",
        )
    console = wide_console(120)
    console.print(table)
    for row in rows:
        if row["note"]:
            console.print(f"{row['name']}: {row['note']}", highlight=False)
    return 0
