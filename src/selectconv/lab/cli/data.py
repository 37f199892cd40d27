"""`selectconv data`: which data sets there are, where they are, and fetching them."""

from argparse import Namespace
from typing import Any

from selectconv.checks import check_choice
from selectconv.errors import DataError, UsageError
from selectconv.lab.cli.output import print_rows
from selectconv.lab.cli.parser import Argument

EXAMPLES = [
    ("selectconv data list", "the data sets, and where they were found"),
    ("selectconv data list imagefolder:photos", "your own images: classes, sizes, counts"),
    ("selectconv data fetch fashion-mnist", "fetch one into the cache"),
    ("selectconv data digest cifar10", "which copy of it this is: env.json of a run has the same"),
]
ARGUMENTS = [
    Argument("action", "list, fetch or digest: the SHA-256 of all images and labels"),
    Argument(
        "name",
        "data set to list, fetch or read, or imagefolder:DIR for your own images (default: all)",
        {"nargs": "?"},
    ),
    Argument("--root", "folder to look in, or to fetch into", {"metavar": "DIR"}),
]


def run(options: Namespace) -> None:
    """List, fetch or read."""
    from selectconv.lab.data.registry import (
        check_dataset_name,
        fetch_dataset,
        list_datasets,
        load_dataset,
    )

    check_choice("action", options.action, ("list", "fetch", "digest"))
    name = options.name
    names = list_datasets() if name is None else [check_dataset_name(name)]
    if options.action == "list":
        print_rows([_describe(name, options.root) for name in names])
        return
    if name is None:
        raise UsageError(f"{options.action} needs a data set: one of {', '.join(names)}.")
    if options.action == "digest":
        print(f"{name}: sha256 {load_dataset(name, options.root, fetch=False).digest}")
        return
    folder = fetch_dataset(name, options.root)
    print(f"{name}: {folder}" if folder else f"{name} needs no files.")


def _describe(name: str, root: str | None) -> dict[str, Any]:
    """Return a data set's row of the table."""
    from selectconv.lab.data.registry import dataset_info, find_dataset

    info = dataset_info(name, root=root)
    try:
        where = str(find_dataset(name, root) or "not found")
    except DataError as error:
        where = str(error)
    return {
        "data set": name,
        "title": info.title,
        "classes": info.num_classes,
        "image": "x".join(map(str, info.shape)),
        "training": info.num_train,
        "test": info.num_test,
        "where": "comes with scikit-learn" if name == "digits" else where,
    }
