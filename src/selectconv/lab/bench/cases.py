"""What `selectconv bench` measures: a training step, an allocation step, inference, batches.

A `Subject` is a network, plain and selective, and a batch of images.
"""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.optimizers import param_groups
from selectconv.core.models import selective_layers
from selectconv.deploy.compress import compress
from selectconv.deploy.cost import count
from selectconv.errors import DataError
from selectconv.extras import import_extra
from selectconv.lab.bench.timing import Rows, compare, in_turn, open_network, ratios, row
from selectconv.lab.data.image_set import DatasetInfo, ImageSet
from selectconv.lab.data.loaders import Batching, draw_epoch, epoch_generator, make_loader
from selectconv.lab.data.registry import Splits, dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.device import build_fabric
from selectconv.lab.train.estimate import reallocate
from selectconv.lab.train.loop import Display, Training
from selectconv.lab.train.network import build_model, check_network
from selectconv.lab.zoo import create_model

_STEPS = 2  # of the trainer: long enough to time, short enough to alternate often
_WEAK = 0.3
_IMAGES, _BATCH, _SEED = 50_000, 128, 0
_TOLERANCE = 1e-5
# What was done to the layers that re-allocate.
KINDS = {
    "plain": "plain",
    "fresh": "selective, fresh",
    "moved": "20% of the slots re-allocated",
    "whole": "20% of the slots re-allocated by whole pixels",
    "closed": "50% of the slots closed",
}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True)
class Subject:
    """A network and its images.

    Attributes:
        model: the network, named as for `selectconv train --model`.
        image_size: height and width of its images.
        batch_size: images of a call.
    """

    model: str = "densenet40"
    image_size: int = 32
    batch_size: int = 64

    def draw_images(self, layout: str = "NCHW") -> Tensor:
        """Draw a batch of images in one of `LAYOUTS`."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator)
        return images.contiguous(memory_format=LAYOUTS[layout])

    def build_network(self, kind: str, layout: str = "NCHW") -> nn.Module:
        """Build the network; all kinds have the same weights.

        Args:
            kind: one of `KINDS`: which slots of the layers that re-allocate were moved or closed.
            layout: of its weights, one of `LAYOUTS`.
        """
        torch.manual_seed(0)
        method = "plain" if kind == "plain" else "select"
        config = resolve({"model": self.model, "method": method, "channels_last": False})
        info = dataset_info(config.data)
        info = replace(info, shape=(info.shape[0], self.image_size, self.image_size))
        check_network(config, info)
        model = build_model(config, info)
        generator = torch.Generator().manual_seed(0)
        for layer in (x for x in selective_layers(model).values() if x.shift is not None):
            if kind in ("moved", "whole"):
                layer.learns_shift = kind == "moved"
                reallocate(layer, 0.2, generator, "learned" if kind == "moved" else kind)
            elif kind == "closed":
                layer.close(torch.randperm(layer.in_channels, generator=generator)[::2])
        # nn.Module.to's overloads do not know memory_format.
        return model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload, no-any-return]


def training_step(
    model: nn.Module, images: Tensor, *, compile: bool = False
) -> Callable[[], object]:
    """Return a training step of a network on these images."""
    labels = torch.arange(len(images), device=images.device) % 10
    optimizer = torch.optim.SGD(
        param_groups(model), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    run = torch.compile(model) if compile else model

    def step() -> None:
        loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure_step(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Time a training step of the plain and the selective network in turn.

    In eager mode both layouts are measured; compiling takes minutes. Of the default subject, the
    trainer's speed follows.
    """
    rows = []
    is_compiled = runtime == "compile"
    about = f"{subject.model}, {'compiled ' if is_compiled else ''}training step"
    for layout in ("NCHW",) if is_compiled else LAYOUTS:
        images = subject.draw_images(layout)
        sides = {
            words: training_step(subject.build_network(kind, layout), images, compile=is_compiled)
            for kind, words in KINDS.items()
        }
        rows += compare("step", f"{about}, {layout}", sides, repeats)
    if subject == Subject():
        rows += measure_trainer(subject, repeats, runtime)
    return rows


def measure_trainer(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Time a network's training: `selectconv train --method plain` against a plain loop.

    The plain loop is what one writes first: eager, NCHW, the same network, optimizer and images,
    already augmented. The trainer's side includes its data pipeline.
    """
    torch.manual_seed(0)
    info = dataset_info("cifar10")
    images = torch.randint(256, (subject.batch_size * _STEPS, *info.shape), dtype=torch.uint8)
    every = ImageSet(images, torch.randint(info.num_classes, (len(images),)))
    settings = {"model": subject.model, "method": "plain", "data": "cifar10", "device": "cpu"}
    is_compiled = runtime == "compile"
    config = resolve({**settings, "batch_size": subject.batch_size, "compile": is_compiled})
    training = Training(config, build_fabric(config), Splits(info, every, every))
    augmented, _ = next(iter(training.train_loader.epoch(0)))
    step = training_step(create_model(subject.model), augmented.contiguous())
    sides = {
        "plain": lambda: [step() for _ in range(_STEPS)],
        "trainer": lambda: training.train_epoch(0, Display()),
    }
    plain, ours = in_turn(sides, repeats).values()
    command = "selectconv train --method plain" + (" --compile" if is_compiled else "")
    return [
        row("step", "trainer: plain eager NCHW loop", [t / _STEPS * 1e3 for t in plain], "ms"),
        row("step", f"trainer: {command}", [t / _STEPS * 1e3 for t in ours], "ms"),
        row("step", "trainer: speed over the plain loop", ratios(plain, ours), "x"),
    ]


def measure_alloc(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Time one de- and re-allocation pass over a network with 30% weak slots."""
    network = subject.build_network("fresh")
    with torch.no_grad():
        network(subject.draw_images()[:2])  # for inputs whose mean is observed
        generator = torch.Generator().manual_seed(0)
        for layer in selective_layers(network).values():
            slots = torch.randperm(layer.in_channels, generator=generator)
            layer.weight[:, slots[: int(_WEAK * layer.in_channels)]] *= 1e-9
    seconds = []
    for _ in range(repeats + 1):
        fresh = copy.deepcopy(network)
        optimizer = torch.optim.SGD(param_groups(fresh), lr=0.1, momentum=0.9, weight_decay=1e-4)
        for parameter in fresh.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        allocator = ChannelAllocator(fresh, optimizer, total_epochs=2, max_copies=None)
        started = time.process_time()
        report = allocator.step(0)
        seconds.append(time.process_time() - started)
    closed = sum(map(len, report.deallocated.values()))
    opened = sum(map(len, report.reallocated.values()))
    case = f"{subject.model}, {closed} slots closed, {opened} re-opened"
    return [
        row("alloc", f"{case}: first call", seconds[:1], "s"),
        row("alloc", f"{case}: later calls", seconds[1:], "s"),
    ]


def measure_infer(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Time the evaluation of a network: masked and compressed, over the plain one.

    In eager mode both layouts are measured. In ONNX Runtime there are no masked networks: what is
    exported is compressed.
    """
    rows = []
    for layout in LAYOUTS if runtime == "eager" else ("NCHW",):
        images = subject.draw_images(layout)
        networks: dict[str, nn.Module] = {}
        for kind, words in KINDS.items():
            network = subject.build_network(kind, layout).eval()
            if kind == "plain" or runtime != "onnxruntime":
                networks[words] = network
            if kind not in ("plain", "fresh"):
                networks[f"compressed, {words}"] = compress(network, images)
        about = f"{subject.model}, {runtime}, batch {subject.batch_size}, {layout}"
        sides = {
            words: partial(open_network(network, images, runtime), images)
            for words, network in networks.items()
        }
        with torch.inference_mode():
            lines = compare("infer", about, sides, repeats)
        dense = count(networks["plain"], images[:1]).macs
        for line, (words, network) in zip(lines, networks.items(), strict=True):
            if words.startswith("compressed"):
                line["macs_ratio"] = round(count(network, images[:1]).macs / dense, 4)
        rows += lines
    return rows


def measure_data(subject: Subject, repeats: int, runtime: str = "eager") -> Rows:
    """Measure training batches of images like CIFAR-10's on the CPU, whatever the subject.

    Both sides make the same batches from the same draws, which is checked before anything is
    measured.

    Raises:
        DataError: Pillow is not installed.
    """
    info, draw = dataset_info("cifar10"), epoch_generator(_SEED, 0)
    images = torch.randint(256, (_IMAGES, *info.shape), generator=draw, dtype=torch.uint8)
    labels = torch.randint(info.num_classes, (_IMAGES,), generator=draw)
    batching = Batching(_BATCH, train=True, seed=_SEED)
    loader = make_loader(ImageSet(images, labels), info, batching)
    ours = itertools.chain.from_iterable(map(loader.epoch, itertools.count()))
    theirs = itertools.chain.from_iterable(
        map(partial(_augment_by_image, images, info), itertools.count())
    )
    difference = float((next(ours)[0] - next(theirs)).abs().max())
    assert difference <= _TOLERANCE, f"the sides differ by {difference}: no comparison"
    whole, single = in_turn(
        {"whole": partial(next, ours), "single": partial(next, theirs)}, repeats
    ).values()
    return [
        row("data", "whole batches", [_BATCH / seconds for seconds in whole], "images/s"),
        row("data", "image by image through PIL", [_BATCH / s for s in single], "images/s"),
        row("data", "whole batches over PIL", ratios(single, whole), "x"),
    ]


def _augment_by_image(images: Tensor, info: DatasetInfo, epoch: int) -> Iterator[Tensor]:
    """Yield an epoch's batches.

    These are the steps of torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize,
    without what its classes add to them, and the stacking of the default collation.
    """
    pillow = import_extra("PIL.Image", "The comparison with PIL", error=DataError)
    expand = import_extra("PIL.ImageOps", "The comparison with PIL", error=DataError).expand
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (info.mean, info.std))
    _, height, width = info.shape

    def augment(index: int, top: int, left: int, mirrored: bool) -> Tensor:
        image = expand(pillow.fromarray(pixels[index]), info.padding)
        image = image.crop((left, top, left + width, top + height))
        if mirrored:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return tensor.to(torch.float32).div_(255).sub_(mean).div_(std)

    draws = draw_epoch(len(images), seed=_SEED, epoch=epoch, padding=info.padding, flip=info.flip)
    for batch in zip(*(draw.split(_BATCH) for draw in draws), strict=True):
        samples = zip(*(draw.tolist() for draw in batch), strict=True)
        # Mirrored ones last, as `DeviceLoader` has them.
        yield torch.stack([augment(*sample) for sample in sorted(samples, key=itemgetter(3))])
