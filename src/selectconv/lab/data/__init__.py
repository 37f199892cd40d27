"""The paper's data sets: found or fetched, read, and served in batches.

`image_set` and `progress` know nothing else; `read/` turns files into images; `obtain/` finds and
fetches files, and checks them with `read/`; `serve/` makes batches of images. `catalogue` lists the
data sets, `registry` is what others call.
"""

from selectconv.files import cache_folder
from selectconv.lab.data.image_set import DatasetInfo, ImageSet, subset_index
from selectconv.lab.data.read.image_folder import ImageFolder
from selectconv.lab.data.registry import (
    Splits,
    dataset_info,
    fetch_dataset,
    find_dataset,
    list_datasets,
    load_dataset,
    where_to_look,
)
from selectconv.lab.data.serve.batches import Loader
from selectconv.lab.data.serve.device_loader import DeviceLoader
from selectconv.lab.data.serve.folder_loader import FolderLoader
from selectconv.lab.data.serve.loader import make_loader

__all__ = [
    "DatasetInfo",
    "DeviceLoader",
    "FolderLoader",
    "ImageFolder",
    "ImageSet",
    "Loader",
    "Splits",
    "cache_folder",
    "dataset_info",
    "fetch_dataset",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "make_loader",
    "subset_index",
    "where_to_look",
]
