"""`selectconv models`: the zoo, its sizes beside the paper's figures."""

from argparse import Namespace

from selectconv.lab.cli.output import print_rows
from selectconv.lab.cli.parser import JSON
from selectconv.lab.zoo.paper import models_table

EXAMPLES = [("selectconv models", "the networks, with parameters and multiply-adds")]
ARGUMENTS = [JSON]


def run(options: Namespace) -> None:
    """Print the table."""
    print_rows(models_table(), as_json=options.json)
