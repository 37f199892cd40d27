"""`selectconv bench step` and `alloc`: what selectivity costs a training."""

import copy
import time

import torch

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.optimizers import param_groups
from selectconv.core.models import selective_layers
from selectconv.lab.bench.subject import KINDS, LAYOUTS, Subject, training_step
from selectconv.lab.bench.timing import Rows, compare, in_turn, ratios, row
from selectconv.lab.data.image_set import ImageSet
from selectconv.lab.data.registry import Splits, dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.device import build_fabric
from selectconv.lab.train.loop import Display, Training
from selectconv.lab.zoo import create_model

_STEPS = 2  # of the trainer: long enough to time, short enough to alternate often
_WEAK = 0.3


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
