"""`selectconv data`: which data sets there are, where they are, and fetching them."""

from jsonargparse import Namespace
from rich.table import Table

from selectconv.checks import check_choice
from selectconv.errors import DataError, UsageError
from selectconv.lab.cli.console import wide_console
from selectconv.lab.cli.parser import Parser
from selectconv.lab.cli.signals import work_begins

ACTIONS = ("list", "fetch")


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", type=str, help="list or fetch")
    parser.add_argument(
        "name",
        type=str | None,
        nargs="?",
        default=None,
        help="data set to fetch or list, or imagefolder:DIR for your own images (default: all)",
    )
    parser.add_argument(
        "--root", type=str | None, default=None, help="folder to look in, or to fetch into"
    )


def run(options: Namespace) -> int:
    """List or fetch."""
    from selectconv.lab.data.registry import check_dataset_name, fetch_dataset, list_datasets

    work_begins()
    check_choice("action", options.action, ACTIONS)
    if options.name is not None:
        check_dataset_name(options.name)
    if options.action == "list":
        _print_list(list_datasets() if options.name is None else [options.name], options.root)
        return 0
    if options.name is None:
        raise UsageError(f"fetch needs a data set: one of {', '.join(list_datasets())}.")
    folder = fetch_dataset(options.name, options.root)
    print(f"{options.name}: {folder}" if folder else f"{options.name} needs no files.")
    return 0


def _print_list(names: list[str], root: str | None) -> None:
    from selectconv.lab.data.registry import dataset_info

    table = Table()
    for head in ("data set", "title"):
        table.add_column(head)
    for head in ("classes", "image", "training", "test"):
        table.add_column(head, justify="right")
    table.add_column("where", overflow="fold")
    for name in names:
        info = dataset_info(name, root=root)
        table.add_row(
            name,
            info.title,
            str(info.num_classes),
            "x".join(map(str, info.shape)),
            f"{info.num_train:,}",
            f"{info.num_test:,}",
            _where(name, root),
        )
    wide_console(120).print(table)


def _where(name: str, root: str | None) -> str:
    from selectconv.lab.data.registry import find_dataset

    if name == "digits":
        return "comes with scikit-learn"
    try:
        found = find_dataset(name, root)
    except DataError as error:
        return str(error)
    return "not found" if found is None else str(found)
