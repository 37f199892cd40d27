"""The paper's data sets: found or fetched, read, and served in batches.

`image_set` and `progress` know nothing else; `read/` turns files into images; `obtain` downloads
and unpacks them; `catalogue` lists the data sets; `registry` finds, fetches and loads one;
`loaders` serves its images in batches.
"""

from selectconv.lab.data.image_set import DatasetInfo, ImageSet, subset_index
from selectconv.lab.data.loaders import Batching, Loader, make_loader
from selectconv.lab.data.read.image_folder import ImageFolder
from selectconv.lab.data.registry import (
    Splits,
    dataset_info,
    fetch_dataset,
    find_dataset,
    list_datasets,
    load_dataset,
)

__all__ = [
    "Batching",
    "DatasetInfo",
    "ImageFolder",
    "ImageSet",
    "Loader",
    "Splits",
    "dataset_info",
    "fetch_dataset",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "make_loader",
    "subset_index",
]
