"""Data sets by name: find, fetch and load them; errors say what to put where."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from selectconv.checks import check_choice, check_count, suggest
from selectconv.errors import DataError, UsageError
from selectconv.files import cache_folder
from selectconv.lab.data.catalogue import ENTRIES, Entry, Images
from selectconv.lab.data.image_set import DatasetInfo, subset_index
from selectconv.lab.data.image_size import shrink_images, shrunk_info
from selectconv.lab.data.obtain.places import search_roots
from selectconv.lab.data.obtain.sources import ARCHIVES, DOWNLOADS, fetch_into
from selectconv.lab.data.read.own_images import PREFIX, describe_images, own_folder, read_images

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set.

    Attributes:
        info: what is known about it.
        train: the training images.
        test: the test images; None where a folder of your images has no `test`.
        holdout: every image that is not trained on, in parts: the training images outside the
            subset, then all test images. Empty unless it was asked for.
    """

    info: DatasetInfo
    train: Images
    test: Images | None
    holdout: tuple[Images, ...] = ()


def list_datasets() -> list[str]:
    """Return the names that `load_dataset` knows.

    Example:
        >>> list_datasets()
        ['fashion-mnist', 'cifar10', 'cifar100', 'tiny-imagenet', 'imagenet', 'digits']
    """
    return list(ENTRIES)


def check_dataset_name(name: object) -> str:
    """Return the name of a data set: one of `list_datasets()`, or `imagefolder:DIR`.

    Raises:
        ValueError: another name; the nearest one is named.
    """
    if isinstance(name, str) and own_folder(name) is not None:
        return name
    if name not in list_datasets():
        names = [*list_datasets(), f"{PREFIX}DIR"]
        raise ValueError(
            f"`data` must be one of {', '.join(names)}; got {name!r}.{suggest(str(name), names)}"
        )
    return str(name)


def dataset_info(
    name: str, image_size: int | None = None, root: Path | str | None = None
) -> DatasetInfo:
    """Return what is known about a data set, without looking for it.

    Your own images are listed, since nothing is known about them beforehand.

    Args:
        name: one of `list_datasets()`, or `imagefolder:DIR`.
        image_size: as for `load_dataset`.
        root: what a relative DIR is relative to; None: the current folder.

    Raises:
        TypeError, ValueError: unknown name; the nearest one is named. A size that is not accepted.
            A DIR that is not there.
        DataError: a folder of your images cannot be read.

    Example:
        >>> dataset_info("cifar10").shape
        (3, 32, 32)
    """
    if own_folder(name) is not None:
        return _entry(name, root, image_size).info
    info = _entry(name).info
    return info if image_size is None else shrunk_info(info, image_size)


def _entry(name: str, root: Path | str | None = None, image_size: int | None = None) -> Entry:
    folder = own_folder(name, root)
    if folder is None:
        return ENTRIES[check_choice("name", name, list_datasets())]
    info = describe_images(name, folder, image_size)
    return Entry(info, (), (), lambda _, info: read_images(folder, info), "your images")


def where_to_look(name: str, root: Path | str | None = None) -> list[Path]:
    """Return the folders in which a data set is looked for, in this order.

    Args:
        name: one of `list_datasets()`.
        root: look here only. None: in `$SELECTCONV_DATA`, the system's folder, the cache.

    Raises:
        ValueError: unknown name.

    Example:
        >>> [path.as_posix() for path in where_to_look("cifar10", "data")][:3]
        ['data/cifar-10-batches-bin', 'data/cifar10/cifar-10-batches-bin', 'data/cifar10']
    """
    entry = _entry(name)
    return [base / place for base in search_roots(root) for place in entry.places]


def find_dataset(name: str, root: Path | str | None = None) -> Path | None:
    """Return where a data set is, without changing anything; None if it is not found.

    It is the folder with its files, or the archive as published, which `load_dataset` and
    `fetch_dataset` unpack beside itself.

    Args:
        name: one of `list_datasets()`.
        root: look here only. None: see `where_to_look`.

    Raises:
        ValueError: unknown name.
        DataError: a folder has only some of the files.
    """
    own = own_folder(name, root)
    if own is not None:
        return own if own.is_dir() else None
    entry = _entry(name)
    for base in search_roots(root):
        for place in entry.places:
            folder = base / place
            missing = entry.missing(folder)
            if not missing:
                return folder
            # The root itself may hold a `train` of something else: not ours unless complete.
            if place != "." and len(missing) < len(entry.files):
                raise DataError(f"{folder} is incomplete: it has no {', '.join(missing)}.")
        archive = ARCHIVES.get(name)
        if archive is not None:
            for path in (base / archive.name, base / name / archive.name):
                if os.path.isfile(path):
                    return path
    return None


def _unpacked(name: str, root: Path | str | None) -> Path | None:
    found = find_dataset(name, root)
    if found is not None and name in ARCHIVES and os.path.isfile(found):
        return ARCHIVES[name].unpack(found, found.parent)
    return found


def fetch_dataset(name: str, root: Path | str | None = None) -> Path | None:
    """Fetch a data set unless it is there already.

    Args:
        name: one of `list_datasets()`.
        root: where it goes. None: into the cache, unless one of the known places has it.

    Returns:
        The folder with its files; None for a set that needs none.

    Raises:
        ValueError: unknown name.
        DataError: it is not available; the error says what to put where.
    """
    entry = _entry(name, root)
    if not entry.places:
        return find_dataset(name, root) if own_folder(name) is not None else None
    found = _unpacked(name, root)
    if found is not None:
        return found
    folder = search_roots(root)[-1]  # the cache, unless a root is given
    try:
        return fetch_into(entry.info, folder)
    except DataError as error:
        raise DataError(f"{error} {_advice(entry, folder)}") from error


def _advice(entry: Entry, folder: Path) -> str:
    return f"Put {entry.wanted} into {folder}, or name the folder that has it with --data-root."


def load_dataset(
    name: str,
    root: Path | str | None = None,
    *,
    fetch: bool = True,
    subset: int | None = None,
    test_subset: int | None = None,
    image_size: int | None = None,
    holdout: bool = False,
) -> Splits:
    """Return the images of a data set.

    Args:
        name: one of `list_datasets()`, or `imagefolder:DIR` for your images: DIR has `train`
            and `test`, each with one folder per class.
        root: exclusive: nothing else is searched, nothing is fetched. None: the known places
            (`where_to_look`) are searched, and what is missing is fetched into the cache.
            A relative DIR is relative to it.
        fetch: whether to fetch what is missing.
        subset: how many training images to use: the first of a permutation that depends on nothing
            but the data set (`subset_index`). None: all.
        test_subset: likewise for the test images.
        image_size: the height and width to shrink the images to; it must divide theirs. Your own
            images may have any size.
        holdout: return the images that are not trained on, too.

    Returns:
        In memory (`ImageSet`), for ImageNet and for your own large images as files
        (`ImageFolder`).

    Raises:
        TypeError, ValueError: unknown name (the nearest one is named), a subset that is not
            a number from 1 to the size of the set, or an image size that is not accepted.
        UsageError: there is no folder `root` for a data set that needs no files; your images have
            no `test`, and `holdout` or `test_subset` asks for it.
        DataError: the data is not available, or damaged; the error says which file, or what to
            put where.

    Example:
        >>> load_dataset("cifra10")
        Traceback (most recent call last):
        ValueError: `name` must be one of ... Did you mean 'cifar10'?
    """
    check_root(name, root)
    entry = _entry(name, root, image_size)
    own = own_folder(name) is not None
    info = entry.info if own else dataset_info(name, image_size)
    check_amounts(info, subset, test_subset, holdout=holdout)  # before anything is read
    train, test = entry.read(_have(entry, root, fetch), entry.info)
    _warn_if_incomplete(entry.info, len(train), 0 if test is None else len(test))
    if test is None:
        return Splits(info, _take("subset", train, subset, name), None)
    parts = [_take("subset", train, subset, name), _take("test_subset", test, test_subset, name)]
    if holdout:
        parts += [*_leave(train, subset), test]
    if image_size is not None and not own:
        parts = [shrink_images(images, image_size) for images in parts]
    return Splits(info, parts[0], parts[1], tuple(parts[2:]))


def check_present(name: str, root: Path | str | None) -> None:
    """Refuse a data set that is neither here nor can be fetched; nothing is read.

    Raises:
        DataError: it is missing; the error says what to put where.
    """
    can_be_fetched = root is None and name in DOWNLOADS
    if own_folder(name) is None and not can_be_fetched:
        _have(_entry(name, root), root, fetch=False)


def check_root(name: str, root: Path | str | None) -> None:
    """Check the folder of a data set that needs no files: of all others, it is looked into.

    Raises:
        UsageError: there is no such folder.
    """
    if root is None or own_folder(name) is not None or _entry(name).places:
        return
    if not Path(root).expanduser().is_dir():
        raise UsageError(f"`data_root` must be a folder; there is no folder {root}.")


def check_amounts(
    info: DatasetInfo,
    subset: int | None = None,
    test_subset: int | None = None,
    *,
    holdout: bool = False,
) -> None:
    """Check that a data set has enough images.

    Raises:
        TypeError, ValueError: it does not.
        UsageError: it has no test images at all, and they are asked for.
    """
    for name, asked in (("holdout", holdout), ("test_subset", test_subset)):
        if asked and not info.num_test:
            raise UsageError(f"`{name}` needs test images: {describe_lack(info)}")
    _check_subset("subset", subset, info.num_train, info.name)
    _check_subset("test_subset", test_subset, info.num_test, info.name)


def describe_lack(info: DatasetInfo) -> str:
    """Say that a folder of images has no test images, and where to put them."""
    return f"{info.name} has no folder test, with one folder of images per class as in train."


def _warn_if_incomplete(info: DatasetInfo, num_train: int, num_test: int) -> None:
    if (num_train, num_test) != (info.num_train, info.num_test):
        _log.warning(
            f"{info.name}: {num_train:,} training and {num_test:,} test images found; the full set "
            f"has {info.num_train:,} and {info.num_test:,}."
        )


def _have(entry: Entry, root: Path | str | None, fetch: bool) -> Path:
    name = entry.info.name
    if not entry.places:
        return Path()
    folder = _unpacked(name, root)
    if folder is not None:
        return folder
    places = ", ".join(str(path) for path in search_roots(root))
    if root is not None:
        raise DataError(f"No {name} in {places}: put {entry.wanted} there.")
    if not fetch or name not in DOWNLOADS:
        advice = _advice(entry, cache_folder())
        raise DataError(f"No {name} in {places}. {advice}")
    _log.info(f"No {name} in {places}: fetching it.")
    fetched = fetch_dataset(name)
    assert fetched is not None
    return fetched


def _check_subset(argument: str, size: int | None, most: int, name: str) -> None:
    if size is None:
        return
    check_count(argument, size, 1)
    if size > most:
        raise ValueError(
            f"`{argument}` must be at most {most:,}, the images of {name}; got {size:,}."
        )


def _take(argument: str, images: Images, size: int | None, name: str) -> Images:
    """Return the first `size` images of the fixed permutation."""
    if size is None:
        return images
    _check_subset(argument, size, len(images), name)
    return images.take(subset_index(len(images), size))


def _leave(images: Images, size: int | None) -> tuple[Images, ...]:
    """Return the images that `_take` leaves, as one part; no part if nothing is left."""
    if size is None or size == len(images):
        return ()
    return (images.take(subset_index(len(images), len(images))[size:]),)
