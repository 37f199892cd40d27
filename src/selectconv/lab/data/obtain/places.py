"""The folders in which data sets are looked for."""

import os
from pathlib import Path

from selectconv.files import cache_folder

# Debian's packages dataset-* put their files here; elsewhere the folder does not exist.
SYSTEM_FOLDER = Path("/usr/share/datasets")


def search_roots(root: Path | str | None) -> list[Path]:
    """Return the folders to search, in this order: `root` alone, or the known places."""
    if root is not None:
        return [Path(root).expanduser()]
    given = os.environ.get("SELECTCONV_DATA")
    return [*([Path(given).expanduser()] if given else []), SYSTEM_FOLDER, cache_folder()]
