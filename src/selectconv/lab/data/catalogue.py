"""What is known about each data set, and where in a folder its files are."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.read import cifar, digits, idx, image_folder, tiny_imagenet
from selectconv.lab.data.read.image_folder import ImageFolder

Images = ImageSet | ImageFolder


@dataclass(frozen=True)
class Entry:
    """A data set as files.

    Attributes:
        info: what a training needs to know.
        places: where in a folder the files may be; fetched ones go to the first. Empty: no files.
        files: what must be there.
        read: the reader of such a folder; it is called with the folder and `info`.
        wanted: what to put into the folder if they are missing.
        suffixes: what the files' names may end with.
    """

    info: DatasetInfo
    places: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[Path, DatasetInfo], tuple[Images, Images | None]]
    wanted: str
    suffixes: tuple[str, ...] = ("",)

    def missing(self, folder: Path) -> list[str]:
        """Return which of the files a folder lacks."""
        # os.path.exists, unlike Path's, takes a folder we may not enter for an empty one.
        return [
            name
            for name in self.files
            if not any(os.path.exists(folder / f"{name}{suffix}") for suffix in self.suffixes)
        ]


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
            ("fashion-mnist", "FashionMNIST/raw", "."),
            idx.FILES,
            idx.read_fashion_mnist,
            "fashion-mnist/ with " + ", ".join(f"{name}.gz" for name in idx.FILES),
            suffixes=("", ".gz"),
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
            ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."),
            cifar.CIFAR10_FILES,
            cifar.read_cifar10,
            "cifar-10-binary.tar.gz or the unpacked cifar-10-batches-bin/ (the binary release, not "
            "the Python one)",
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
            ("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100", "."),
            cifar.CIFAR100_FILES,
            cifar.read_cifar100,
            "cifar-100-binary.tar.gz or the unpacked cifar-100-binary/ (the binary release, not "
            "the Python one)",
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
            ("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "tiny-imagenet", "."),
            tiny_imagenet.FILES,
            tiny_imagenet.read_tiny_imagenet,
            "tiny-imagenet-200.zip or the unpacked tiny-imagenet-200/",
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
            ("imagenet", "."),
            image_folder.FILES,
            image_folder.read_image_folder,
            "imagenet/ with train/ and val/, each with one folder of JPEG files per class",
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
            (),
            (),
            digits.read_digits,
            "nothing: it comes with scikit-learn",
        ),
    )
}
