"""What a run knows about its images, where they are the user's own.

It is written into the run's folder, so that a trained network can be loaded, compressed and
exported where the images are not, and so that a run does not go on with other images than it
began with.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from selectconv.errors import UsageError
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.run_folder import IMAGES, RunFolder

_WORDS = {
    "classes": "classes",
    "num_train": "number of training images",
    "num_test": "number of test images",
    "shape": "shape of the images",
}


def describe_data(config: TrainConfig) -> DatasetInfo:
    """Return what is known about the data set of these settings; a user's own images are listed.

    Raises:
        UsageError, DataError: the user's own images are missing, or cannot be read.
    """
    return dataset_info(config.data, config.image_size, config.data_root)


def run_data(folder: Path, config: TrainConfig) -> DatasetInfo:
    """Return what is known about a run's data set; no images are needed.

    Raises:
        RunError: the run's own file about it is damaged.
    """
    path = RunFolder(folder).check(IMAGES)
    if not path.exists():
        return describe_data(config)
    content: dict[str, Any] = json.loads(path.read_bytes())
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return DatasetInfo(**{**content, **lists})


def record_data(folder: RunFolder, info: DatasetInfo) -> None:
    """Write what is known about the user's own images."""
    if info.classes:
        text = json.dumps(dataclasses.asdict(info), indent=1) + "\n"
        folder.write({IMAGES: text.encode()})


def check_same_images(
    before: DatasetInfo, found: DatasetInfo, *names: str, remedy: str = "start another run"
) -> None:
    """Refuse images that differ from those that a run began with.

    Args:
        before: as the run knows them.
        found: as they are now.
        names: what must be equal besides the classes: attributes of `DatasetInfo`.
        remedy: what else to do than to restore the images.

    Raises:
        UsageError: they differ.
    """
    for name in ("classes", *names):
        old, new = getattr(before, name), getattr(found, name)
        if old != new:
            raise UsageError(
                f"`data`: {found.name} has other images than the run began with: restore them, or "
                f"{remedy}. Its {_WORDS[name]}: {new}; the run's: {old}."
            )
