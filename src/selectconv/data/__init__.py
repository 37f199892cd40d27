"""The paper's data sets: found or fetched, read, and served in batches."""

from selectconv.data.device_loader import DeviceLoader
from selectconv.data.folder_loader import FolderLoader
from selectconv.data.image_folder import ImageFolder
from selectconv.data.image_set import ImageSet, subset_index
from selectconv.data.loader import Loader, make_loader
from selectconv.data.registry import (
    DatasetInfo,
    Splits,
    cache_folder,
    dataset_info,
    fetch_dataset,
    find_dataset,
    list_datasets,
    load_dataset,
    where_to_look,
)

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
