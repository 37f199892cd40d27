"""What is known about each data set: what it is, where its files are, and how they are read."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read import image_folder, small_images
from selectconv.lab.data.read.image_folder import ImageFolder

Images = ImageSet | ImageFolder

_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_TINY_IMAGENET = "http://cs231n.stanford.edu/"


@dataclass(frozen=True)
class Entry:
    """A data set as files.

    Attributes:
        info: what a training needs to know.
        read: the reader of a folder with the files; it is called with the folder and `info`.
        places: where in a folder the files may be; fetched ones go to the first.
        files: what must be there; a set that needs none is found anywhere.
        wanted: what to put into the folder if they are missing.
        suffixes: what the files' names may end with.
        archive: the file that holds all of them as the folder `places[0]`; None: no such file.
        downloads: the published files, address to MD5. Empty: they cannot be fetched.
        max_bytes: the most that a download may have, or an archive unpack to.
    """

    info: DatasetInfo
    read: Callable[[Path, DatasetInfo], tuple[Images, Images | None]]
    places: tuple[str, ...] = (".",)
    files: tuple[str, ...] = ()
    wanted: str = ""
    suffixes: tuple[str, ...] = ("",)
    archive: str | None = None
    downloads: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int = 0

    def missing(self, folder: Path) -> list[str]:
        """Return which of the files a folder lacks."""
        # os.path.exists, unlike Path's, takes a folder we may not enter for an empty one.
        return [
            name
            for name in self.files
            if not any(os.path.exists(folder / f"{name}{suffix}") for suffix in self.suffixes)
        ]


# Checksums: the data sets' own pages (Fashion-MNIST's README, the CIFAR page); Tiny-ImageNet's page
# publishes none, it is the one that other readers of the archive agree on.
# Statistics are those of the training set, over all its pixels. Fashion-MNIST and digits: computed
# from the files (Fashion-MNIST's are not MNIST's 0.1307/0.3081, which the paper's authors used).
# CIFAR: as published by many, four digits of the exact values. Tiny-ImageNet: as published for its
# training set; the authors used ImageNet's. ImageNet: the usual ones.
ENTRIES = {
    entry.info.name: entry
    for entry in (
        Entry(
            DatasetInfo(
                name="fashion-mnist",
                title="Fashion-MNIST",
                num_classes=10,
                shape=(1, 28, 28),
                num_train=60_000,
                num_test=10_000,
                padding=4,
                flip=True,
                mean=(0.2860,),
                std=(0.3530,),
            ),
            small_images.read_fashion_mnist,
            places=("fashion-mnist", "FashionMNIST/raw", "."),
            files=small_images.FASHION_MNIST_FILES,
            wanted="fashion-mnist/ with "
            + ", ".join(f"{name}.gz" for name in small_images.FASHION_MNIST_FILES),
            suffixes=("", ".gz"),
            downloads={
                f"{_FASHION_MNIST}train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                f"{_FASHION_MNIST}train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                f"{_FASHION_MNIST}t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                f"{_FASHION_MNIST}t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
            max_bytes=30_000_000,
        ),
        Entry(
            DatasetInfo(
                name="cifar10",
                title="CIFAR-10",
                num_classes=10,
                shape=(3, 32, 32),
                num_train=50_000,
                num_test=10_000,
                padding=4,
                flip=True,
                mean=(0.4914, 0.4822, 0.4465),
                std=(0.2470, 0.2435, 0.2616),
            ),
            small_images.read_cifar,
            places=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."),
            files=small_images.CIFAR10_FILES,
            wanted="cifar-10-binary.tar.gz or the unpacked cifar-10-batches-bin/ (the binary "
            "release, not the Python one)",
            archive="cifar-10-binary.tar.gz",
            downloads={f"{_CIFAR}cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
            max_bytes=200_000_000,
        ),
        Entry(
            DatasetInfo(
                name="cifar100",
                title="CIFAR-100",
                num_classes=100,
                shape=(3, 32, 32),
                num_train=50_000,
                num_test=10_000,
                padding=4,
                flip=True,
                mean=(0.5071, 0.4865, 0.4409),
                std=(0.2673, 0.2564, 0.2762),
            ),
            small_images.read_cifar,
            places=("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100", "."),
            files=small_images.CIFAR100_FILES,
            wanted="cifar-100-binary.tar.gz or the unpacked cifar-100-binary/ (the binary release, "
            "not the Python one)",
            archive="cifar-100-binary.tar.gz",
            downloads={f"{_CIFAR}cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
            max_bytes=200_000_000,
        ),
        Entry(
            DatasetInfo(
                name="tiny-imagenet",
                title="Tiny-ImageNet",
                num_classes=200,
                shape=(3, 64, 64),
                num_train=100_000,
                num_test=10_000,
                padding=8,
                flip=True,
                mean=(0.4802, 0.4481, 0.3975),
                std=(0.2770, 0.2691, 0.2821),
            ),
            small_images.read_tiny_imagenet,
            places=("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "tiny-imagenet", "."),
            files=small_images.TINY_IMAGENET_FILES,
            wanted="tiny-imagenet-200.zip or the unpacked tiny-imagenet-200/",
            archive="tiny-imagenet-200.zip",
            downloads={
                f"{_TINY_IMAGENET}tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"
            },
            max_bytes=1_000_000_000,
        ),
        Entry(
            DatasetInfo(
                name="imagenet",
                title="ImageNet",
                num_classes=1000,
                shape=(3, 224, 224),
                num_train=1_281_167,
                num_test=50_000,
                padding=0,
                flip=True,
                mean=(0.485, 0.456, 0.406),
                std=(0.229, 0.224, 0.225),
            ),
            image_folder.read_imagenet,
            places=("imagenet", "."),
            files=image_folder.FILES,
            wanted="imagenet/ with train/ and val/, each with one folder of JPEG files per class",
        ),
        Entry(
            DatasetInfo(
                name="digits",
                title="8x8 digits of scikit-learn",
                num_classes=10,
                shape=(1, 8, 8),
                num_train=1437,
                num_test=360,
                padding=1,
                flip=False,  # a mirrored digit is not a digit
                mean=(0.3054,),
                std=(0.3753,),
            ),
            small_images.read_digits,
        ),
    )
}
