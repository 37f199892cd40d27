"""The 8x8 digits that ship with scikit-learn: no files, no network."""

from pathlib import Path

import numpy as np
import torch

from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.data.image_set import DatasetInfo, ImageSet


def read_digits(folder: Path, info: DatasetInfo) -> tuple[ImageSet, ImageSet]:
    """Return training and test images: in the order of the data set, the last 360 are the test set.

    Args:
        folder: not used; every reader takes one.
        info: the data set.

    Raises:
        DataError: scikit-learn is not installed.
    """
    bunch = import_extra("sklearn.datasets", "The digits data set", error=DataError).load_digits()
    # Pixels are 0 to 16.
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    split = info.num_train
    return ImageSet(images[:split], labels[:split]), ImageSet(images[split:], labels[split:])
