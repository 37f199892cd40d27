"""The folders in which data sets are looked for."""

import os
from pathlib import Path

# Debian's packages dataset-* put their files here; elsewhere the folder does not exist.
SYSTEM_FOLDER = Path("/usr/share/datasets")


def cache_folder() -> Path:
    """Return the folder that fetched data sets go to: `$XDG_CACHE_HOME` or `~/.cache`, and ours."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "selectconv"


def search_roots(root: Path | str | None) -> list[Path]:
    """Return the folders to search, in this order: `root` alone, or the known places."""
    if root is not None:
        return [Path(root).expanduser()]
    given = os.environ.get("SELECTCONV_DATA")
    return [*([Path(given).expanduser()] if given else []), SYSTEM_FOLDER, cache_folder()]
