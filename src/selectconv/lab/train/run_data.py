"""What a run knows about its images, where they are the user's own.

It is written into the run's folder, so that a trained network can be loaded, compressed and
exported where the images are not, and so that a run does not go on with other images than it
began with.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from selectconv.errors import RunError, UsageError
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.run_folder import IMAGES, RunFolder

_WORDS = {
    "classes": "the classes {}",
    "num_train": "{} training images",
    "num_test": "{} test images",
    "shape": "images of shape {}",
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
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in content.items()
        }
        return DatasetInfo(**known)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


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
                f"`data`: the run began with {_WORDS[name].format(_say(old))}, and {found.name} "
                f"has {_say(new)} now: restore the images, or {remedy}."
            )


def _say(value: Any) -> str:
    if isinstance(value, tuple):
        return ("x" if isinstance(value[0], int) else ", ").join(map(str, value))
    return f"{value:,}"
