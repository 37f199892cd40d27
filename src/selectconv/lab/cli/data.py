"""`selectconv data`: which data sets there are, where they are, and fetching them."""

from argparse import Namespace

from selectconv.checks import check_choice
from selectconv.errors import DataError, UsageError
from selectconv.lab.cli.parser import Argument
from selectconv.tables import text_table

EXAMPLES = [
    ("selectconv data list", "the data sets, and where they were found"),
    ("selectconv data list imagefolder:photos", "your own images: classes, sizes, counts"),
    ("selectconv data fetch fashion-mnist", "fetch one into the cache"),
]
_HEADS = ("data set", "title", "classes", "image", "training", "test", "where")
ARGUMENTS = [
    Argument("action", "list or fetch"),
    Argument(
        "name",
        "data set to fetch or list, or imagefolder:DIR for your own images (default: all)",
        {"nargs": "?"},
    ),
    Argument("--root", "folder to look in, or to fetch into", {"metavar": "DIR"}),
]


def run(options: Namespace) -> None:
    """List or fetch."""
    from selectconv.lab.data.registry import check_dataset_name, fetch_dataset, list_datasets

    check_choice("action", options.action, ("list", "fetch"))
    name = options.name
    if name is not None:
        check_dataset_name(name)
    if options.action == "list":
        names = list_datasets() if name is None else [name]
        rows = [_describe(name, options.root) for name in names]
        print(text_table([_HEADS, *rows], right=range(2, 6)))
        return
    if name is None:
        raise UsageError(f"fetch needs a data set: one of {', '.join(list_datasets())}.")
    folder = fetch_dataset(name, options.root)
    print(f"{name}: {folder}" if folder else f"{name} needs no files.")


def _describe(name: str, root: str | None) -> tuple[str, ...]:
    """Return a data set's line of the table."""
    from selectconv.lab.data.registry import dataset_info, find_dataset

    info = dataset_info(name, root=root)
    shape = "x".join(map(str, info.shape))
    try:
        where = str(find_dataset(name, root) or "not found")
    except DataError as error:
        where = str(error)
    if name == "digits":
        where = "comes with scikit-learn"
    counts = (f"{info.num_train:,}", f"{info.num_test:,}")
    return name, info.title, str(info.num_classes), shape, *counts, where
