"""Small data sets in their true file formats, written byte by byte, and hostile archives."""

import gzip
import io
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch

NOISE_CLASSES = ("cat", "dog", "owl")
TINY_CLASSES = ("n03", "n01", "n02")


def listing(folder: Path) -> dict[str, int]:
    """Every file and folder below `folder`, hidden ones too, with its size."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size if path.is_file() else -1
        for path in folder.rglob("*")
    }


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim])
    for size in array.shape:
        header += struct.pack(">I", size)
    return header + array.astype(np.uint8).tobytes()


def fashion_arrays(num_train=20, num_test=10, seed=0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "train-images-idx3-ubyte": draw.integers(0, 256, (num_train, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": draw.integers(0, 10, num_train, dtype=np.uint8),
        "t10k-images-idx3-ubyte": draw.integers(0, 256, (num_test, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": draw.integers(0, 10, num_test, dtype=np.uint8),
    }


def write_fashion_mnist(folder: Path, *, zipped=True, **sizes) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = fashion_arrays(**sizes)
    for name, array in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array), mtime=0))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return arrays


def cifar_records(labels: np.ndarray, images: np.ndarray) -> bytes:
    """`labels` (N, 1 or 2), `images` (N, 3, 32, 32)."""
    return b"".join(
        bytes(label.tolist()) + image.tobytes() for label, image in zip(labels, images, strict=True)
    )


def _write_cifar(folder: Path, sizes: dict[str, int], *spans: tuple[int, int]):
    """Write files of so many images, whose labels lie in the spans; the last label counts."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    parts = []
    for name, size in sizes.items():
        images = draw.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)
        labels = np.hstack([draw.integers(*span, (size, 1), dtype=np.uint8) for span in spans])
        (folder / name).write_bytes(cifar_records(labels, images))
        parts.append((images, labels[:, -1]))
    return parts


def write_cifar10(folder: Path):
    """Return images and labels of the training set, images and labels of the test set."""
    batches = {f"data_batch_{number}.bin": 3 for number in range(1, 6)}
    *train, test = _write_cifar(folder, {**batches, "test_batch.bin": 4}, (0, 10))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return *map(np.concatenate, zip(*train, strict=True)), *test


def write_cifar100(folder: Path):
    """Return the same of CIFAR-100, with its fine labels."""
    train, test = _write_cifar(folder, {"train.bin": 7, "test.bin": 4}, (0, 20), (20, 100))
    return *train, *test


def write_jpeg(path: Path, grey: int, *, size=(64, 64), mode="RGB") -> None:
    """An image of one grey, which survives JPEG within a step or two."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    colour = grey if mode == "L" else (grey, grey, grey)
    Image.new(mode, size, colour).save(path, format="JPEG", quality=95)


def write_pixels(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_noise(folder: Path, *, size=(16, 16), gray=False, parts=(("train", 4), ("test", 2))):
    """Write PNG images of random pixels, in one folder per class; returns them by path."""
    draw = np.random.default_rng(0)
    shape = (size[1], size[0]) if gray else (size[1], size[0], 3)
    written = {
        folder / part / name / f"{number}.png": draw.integers(0, 256, shape, dtype=np.uint8)
        for part, count in parts
        for name in NOISE_CLASSES
        for number in range(count)
    }
    for path, pixels in written.items():
        write_pixels(path, pixels)
    return written


def write_tiny_imagenet(folder: Path) -> None:
    """Two images per class, then four for validation, each 10 lighter than the one before."""
    grey = 0
    for name in TINY_CLASSES:
        for number, mode in enumerate(("RGB", "L")):  # some of the real ones are grey-scale files
            grey += 10
            path = folder / "train" / name / "images" / f"{name}_{number}.JPEG"
            write_jpeg(path, grey, mode=mode)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("x\t0\t0\t1\t1\n")
    lines = []
    # Neither in the order of the names nor in that of the classes.
    for number, name in ((2, "n01"), (0, "n02"), (10, "n03"), (1, "n01")):
        grey += 10
        file = f"val_{number}.JPEG"
        write_jpeg(folder / "val" / "images" / file, grey)
        lines.append(f"{file}\t{name}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("".join(f"{name}\n" for name in TINY_CLASSES))


def write_image_folder(folder: Path) -> None:
    for part, count in (("train", 3), ("val", 1)):
        for label, name in enumerate(("n01", "n02")):
            for number in range(count):
                grey = 40 * number + 100 * label + (20 if part == "val" else 0)
                write_jpeg(folder / part / name / f"{name}_{number}.JPEG", grey, size=(80, 60))


def write_tar(path: Path, members, kind=tarfile.REGTYPE, link="") -> None:
    """`members`: (name, content); those without content are of a kind, such as a link."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if not content:
                info.type, info.linkname = kind, link
            archive.addfile(info, io.BytesIO(content))


def write_zip(path: Path, members) -> None:
    """`members`: (name or ZipInfo, content)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members:
            archive.writestr(member, content)


def archive_folder(path: Path, folder: Path) -> None:
    """What `tar czf` or `zip -r` makes of a folder."""
    kind, suffix = ("zip", ".zip") if path.suffix == ".zip" else ("gztar", ".tar.gz")
    shutil.make_archive(str(path).removesuffix(suffix), kind, folder.parent, folder.name)


def assert_same_batches(first, second):
    """Compare two lists of (images, labels), bit by bit."""
    assert len(first) == len(second)
    for (a, x), (b, y) in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)
