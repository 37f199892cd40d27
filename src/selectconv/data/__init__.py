"""The paper's data sets: found or fetched, read, and served in batches.

`image_set` and `progress` know nothing else; `read/` turns files into images; `obtain/` finds and
fetches files, and checks them with `read/`; `serve/` makes batches of images. `catalogue` lists the
data sets, `registry` is what others call.
"""

from selectconv.data.image_set import DatasetInfo, ImageSet, subset_index
from selectconv.data.read.image_folder import ImageFolder
from selectconv.data.registry import (
    Splits,
    dataset_info,
    fetch_dataset,
    find_dataset,
    list_datasets,
    load_dataset,
    where_to_look,
)
from selectconv.data.serve.batches import Loader
from selectconv.data.serve.device_loader import DeviceLoader
from selectconv.data.serve.folder_loader import FolderLoader
from selectconv.data.serve.loader import make_loader
from selectconv.files import cache_folder

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
