"""Data sets by name: find, fetch and load them; errors say what to put where."""

import hashlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from selectconv.checks import check_count, suggest
from selectconv.errors import BadValue, DataError, UsageError
from selectconv.files import cache_folder
from selectconv.lab.data.catalogue import ENTRIES, Entry, Images
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, subset_index
from selectconv.lab.data.obtain import download, made_whole, unpack
from selectconv.lab.data.read.image_folder import (
    PREFIX,
    describe_own_images,
    own_folder,
    read_own_images,
)

# Debian's packages dataset-* put their files here; elsewhere the folder does not exist.
SYSTEM_FOLDER = Path("/usr/share/datasets")

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
        digest: SHA-256 of all its images and labels, whichever of them are used; of image files
            that are decoded when asked for, of their names and labels.
    """

    info: DatasetInfo
    train: Images
    test: Images | None
    holdout: tuple[Images, ...] = ()
    digest: str = ""


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
    if isinstance(name, str) and (name in ENTRIES or own_folder(name) is not None):
        return name
    names = [*ENTRIES, f"{PREFIX}DIR"]
    raise BadValue(
        f"`data` must be one of {', '.join(names)}; got {name!r}.{suggest(str(name), names)}"
    )


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
    info = _entry(name, root, image_size).info
    return info if image_size is None else info.shrunk(image_size)


def _entry(name: str, root: Path | str | None = None, image_size: int | None = None) -> Entry:
    """Return the catalogue's entry, or one for a folder of the user's own images."""
    folder = own_folder(check_dataset_name(name), root)
    if folder is None:
        return ENTRIES[name]
    info = describe_own_images(name, folder, image_size)
    return Entry(info, read_own_images, places=(str(folder.absolute()),), files=("train",))


def find_dataset(name: str, root: Path | str | None = None) -> Path | None:
    """Return where a data set is, without changing anything; None if it needs files to be found.

    It is the folder with its files, or the archive as published, which `load_dataset` and
    `fetch_dataset` unpack beside itself.

    Args:
        name: as for `load_dataset`.
        root: look here only. None: in `$SELECTCONV_DATA`, the system's folder and the cache.

    Raises:
        ValueError: unknown name.
        UsageError: there is no folder `root` for a data set that needs no files.
        DataError: a folder has only some of the files.
    """
    return _find(_entry(name, root), root)


def _find(entry: Entry, root: Path | str | None) -> Path | None:
    roots = _search_roots(root)
    if root is not None and not entry.files and not roots[0].is_dir():
        raise UsageError(f"`data_root` must be a folder; there is no folder {root}.")
    for base in roots:
        for place in entry.places:
            folder = base / place
            missing = entry.missing(folder)
            if not missing:
                return folder
            # The root itself may hold a `train` of something else: not ours unless complete.
            if place != "." and len(missing) < len(entry.files):
                raise DataError(f"{folder} is incomplete: it has no {', '.join(missing)}.")
        if entry.archive is not None:
            for path in (base / entry.archive, base / entry.info.name / entry.archive):
                if os.path.isfile(path):
                    return path
    return None


def _search_roots(root: Path | str | None) -> list[Path]:
    """Return the folders to search, in this order: `root` alone, or the known places."""
    if root is not None:
        return [Path(root).expanduser()]
    given = os.environ.get("SELECTCONV_DATA")
    return [*([Path(given).expanduser()] if given else []), SYSTEM_FOLDER, cache_folder()]


def check_present(name: str, root: Path | str | None) -> None:
    """Refuse a data set that is neither here nor can be fetched; nothing is read.

    Raises:
        DataError: it is missing; the error says what to put where.
    """
    entry = _entry(name, root)
    if root is not None or not entry.downloads:
        _obtain(entry, root, fetch=False)


def fetch_dataset(name: str, root: Path | str | None = None) -> Path | None:
    """Fetch a data set unless it is there already.

    Args:
        name: as for `load_dataset`.
        root: where it goes. None: into the cache, unless one of the known places has it.

    Returns:
        The folder with its files; None for a set that needs none.

    Raises:
        ValueError: unknown name.
        DataError: it is not available; the error says what to put where.
    """
    entry = _entry(name, root)
    return _obtain(entry, root, fetch=True) if entry.files else None


def _obtain(entry: Entry, root: Path | str | None, *, fetch: bool) -> Path:
    """Return the folder with the files: found, or unpacked where the archive lies, or fetched."""
    found = _find(entry, root)
    if found is not None:
        target = found.parent / entry.places[0]
        return unpack(found, target, entry.max_bytes) if found.is_file() else found
    roots = _search_roots(root)
    problem = f"No {entry.info.name} in {', '.join(map(str, roots))}."
    if fetch and entry.downloads:
        try:
            return _fetch(entry, roots[-1] / entry.places[0])
        except (DataError, OSError) as error:
            problem = str(error)
    advice = ", or name the folder that has it with --data-root" if root is None else ""
    raise DataError(f"{problem} Put {entry.wanted} into {roots[-1]}{advice}.")


def _fetch(entry: Entry, target: Path) -> Path:
    with made_whole(target) as scratch:
        folder = scratch if entry.archive else scratch / target.name
        folder.mkdir(exist_ok=True)
        for url, md5 in entry.downloads.items():
            path = download(url, md5, folder / url.rpartition("/")[2], entry.max_bytes)
        if entry.archive:
            unpack(path, scratch / target.name, entry.max_bytes)
    return target


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
        root: exclusive: nothing else is searched, nothing is fetched. None: the known places are
            searched (`find_dataset`), and what is missing is fetched into the cache. A relative DIR
            is relative to it.
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
        selectconv.errors.BadValue: `data` must be one of ... Did you mean 'cifar10'?
    """
    entry = _entry(name, root, image_size)
    info = entry.info if image_size is None else entry.info.shrunk(image_size)
    check_amounts(info, subset, test_subset, holdout=holdout)  # before anything is read
    train, test = entry.read(_obtain(entry, root, fetch=fetch and root is None), entry.info)
    digest = hashlib.sha256()
    for part in (train, *([] if test is None else [test])):
        content = part.images.numpy() if isinstance(part, ImageSet) else part.names
        digest.update(content.data)
        digest.update(part.labels.numpy().data)
    found = replace(info, num_train=len(train), num_test=0 if test is None else len(test))
    if found != info:
        _log.warning(
            f"{name}: {found.num_train:,} training and {found.num_test:,} test images found; the "
            f"full set has {info.num_train:,} and {info.num_test:,}."
        )
        check_amounts(found, subset, test_subset)
    if info != entry.info:
        # In memory, both: image files come in the size that is asked for.
        train, test = (cast(ImageSet, part).shrunk(info.shape[1]) for part in (train, test))
    held: tuple[Images, ...] = ()
    if holdout and test is not None:
        unused = subset_index(len(train), len(train))[subset or len(train) :]
        held = (train.take(unused), test) if len(unused) else (test,)
    if subset is not None:
        train = train.take(subset_index(len(train), subset))
    if test is not None and test_subset is not None:
        test = test.take(subset_index(len(test), test_subset))
    return Splits(info, train, test, held, digest.hexdigest())


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
    amounts = (("subset", subset, info.num_train), ("test_subset", test_subset, info.num_test))
    for name, size, most in amounts:
        if size is not None and check_count(name, size, 1) > most:
            raise BadValue(
                f"`{name}` must be at most {most:,}, the images of {info.name}; got {size:,}."
            )


def describe_lack(info: DatasetInfo) -> str:
    """Say that a folder of images has no test images, and where to put them."""
    return f"{info.name} has no folder test, with one folder of images per class as in train."
