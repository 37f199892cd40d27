"""The measurements behind docs/speed.md, and their tables.

    python benchmarks/speed.py [step masked trainer compressed ...] [--repeats 7]
    python benchmarks/speed.py --tables    # write the tables of both pages from the results

Each section is measured network by network, and saved to results/speed_SECTION.jsonl, in which the
lines of that network are replaced. CPU time, one thread, all sides of a comparison in turn. Leave
the machine alone meanwhile. `compressed`: half of the slots of every selective layer are closed, at
random; in a residual trunk that lets few filters go, so that much is gathered. `pruning`: half of
the multiply-adds, by de-allocation of slots and of filters, and by Torch-Pruning; in OpenVINO, too,
where that is installed. Weights are random, and so are the scales and offsets of batch norm: time
and size count here, not what the networks compute.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import selectconv as sc
from selectconv.core.threads import num_threads
from selectconv.lab.bench.cases import (
    KINDS,
    LAYOUTS,
    Subject,
    measure_alloc,
    measure_infer,
    measure_step,
    measure_trainer,
)
from selectconv.lab.bench.timing import Rows, compare, open_network

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGES = (ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "SPEED.md")

# Networks by section: what `--model` of `selectconv bench` takes, image size, batch size.
STEP = {
    "ResNet-18": Subject("timm:resnet18", 32, 16),
    "ResNet-26": Subject("timm:resnet26", 32, 16),
    "DenseNet-121": Subject("timm:densenet121", 32, 16),
    "EfficientNet-B0": Subject("timm:efficientnet_b0", 32, 32),
    "MobileNetV2": Subject("timm:mobilenetv2_100", 32, 32),
}
MASKED = {
    "ResNet-18": Subject("timm:resnet18", 64, 1),
    "MobileNetV3-small": Subject("timm:mobilenetv3_small_100", 96, 1),
}
COMPRESSED = {
    "ResNet-18": Subject("timm:resnet18", 64),
    "MobileNetV3-small": Subject("timm:mobilenetv3_small_100", 96),
    "EfficientNet-B0": Subject("timm:efficientnet_b0", 96),
    "DenseNet-100": Subject("densenet100", 32),
    "ResNet-164": Subject("resnet164", 32),
    "U-Net": Subject("benchmarks.networks:unet", 64),
}
PRUNING = COMPRESSED | {
    "ResNet-50": Subject("timm:resnet50", 64),
    "MobileNetV2": Subject("timm:mobilenetv2_100", 96),
}
WAYS = ("slots", "filters", "Torch-Pruning")
SHIFTS = {
    "small MobileNet": Subject("selectconv.lab.reproduce.networks:small_mobilenet", 16, 8),
    "ResNet-164": Subject("resnet164", 32, 8),
    "DenseNet-40": Subject("densenet40", 32, 8),
    "ResNet-18": Subject("timm:resnet18", 32, 8),
}
BATCHES = (1, 8, 64)
RUNTIMES = ("eager", "onnxruntime")
CLASSES = 10  # outputs of every network here
ROUND_TO = (None, 1, 8)


def measure_both_trainers(subject: Subject, repeats: int) -> Rows:
    """Time `selectconv train` against a plain loop, eager and compiled."""
    both = ("eager", "compile")
    return [line for way in both for line in measure_trainer(subject, repeats, way)]


def measure_compressed(subject: Subject, repeats: int) -> Rows:
    """Time compressed networks in both runtimes, for each batch and `round_to`."""
    closed, x = subject.build_network("closed").eval(), subject.draw_images()[:2]
    networks = {"plain": subject.build_network("plain").eval()} | {
        f"round_to={number}": sc.compress(closed, x, round_to=number) for number in ROUND_TO
    }
    return [
        {**line, "round_to": line["way"].partition("=")[2]}
        for line in _compare("compressed", subject, networks, repeats)
    ]


def measure_pruning(subject: Subject, repeats: int) -> Rows:
    """Time networks of half the multiply-adds: Torch-Pruning's, and ours with as many as it has."""
    plain, x = subject.build_network("plain").eval(), subject.draw_images()[:1]
    _draw_norms(plain)
    share, pruned, dense = 0.5, {}, sc.count(plain, x).macs
    if subject.model != "resnet164":  # Torch-Pruning 1.6 fails on its zero-padded trunk
        pruned["Torch-Pruning"] = _prune(plain, x, dense // 2)
        share = sc.count(pruned["Torch-Pruning"], x).macs / dense
    ours = {f"{one}s": _deallocate(plain, x, share, one) for one in ("slot", "filter")}
    networks = {"plain": plain, **ours, **pruned}
    has_openvino = find_spec("openvino") is not None
    runtimes = (*RUNTIMES, *(["openvino"] if has_openvino else []))
    return _compare("pruning", subject, networks, repeats, runtimes, BATCHES[:2])


def _open(network: nn.Module, example: Tensor, runtime: str) -> Callable[[Tensor], object]:
    """Return what runs a network in a runtime: one of `selectconv bench`'s, or OpenVINO."""
    if runtime != "openvino":
        return open_network(network, example, runtime)
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        sc.export_onnx(network, file, example)
        options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.Core().compile_model(str(file), "CPU", options)
    return lambda x: model(x.numpy())


def _compare(
    section: str,
    subject: Subject,
    networks: dict[str, nn.Module],
    repeats: int,
    runtimes: Iterable[str] = RUNTIMES,
    batches: Iterable[int] = BATCHES,
) -> Rows:
    """Time networks over the plain one, for each runtime and batch."""
    rows = []
    images = subject.draw_images()  # the largest batch
    costs = {way: sc.count(network, images[:1]) for way, network in networks.items()}
    dense = costs["plain"]
    for runtime in runtimes:
        opened = {way: _open(net, images[:2], runtime) for way, net in networks.items()}
        for batch in batches:
            sides = {way: partial(run, images[:batch]) for way, run in opened.items()}
            about = f"{subject.model}, {runtime}, batch {batch}"
            with torch.inference_mode():
                lines = compare(section, about, sides, repeats)
            for line, (way, cost) in list(zip(lines, costs.items(), strict=True))[1:]:
                line |= {"runtime": runtime, "batch": batch, "way": way}
                line["macs_ratio"] = round(cost.macs / dense.macs, 4)
                line["params_ratio"] = round(cost.params / dense.params, 4)
                rows.append(line)
    return rows


def _draw_norms(model: nn.Module) -> None:
    """Draw scales and offsets of batch norm, as if trained: all equal, they would rank nothing."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.rand(module.num_features, generator=generator))
                module.bias.copy_(0.3 * torch.randn(module.num_features, generator=generator))


def _deallocate(plain: nn.Module, x: Tensor, target: float, granularity: str) -> nn.Module:
    model = sc.convert(copy.deepcopy(plain), example_input=x)
    allocator = sc.ChannelAllocator(
        model, total_epochs=1, stop_at=1.0, mode="dealloc", target_macs=target,
        granularity=granularity, example_input=x,
    )  # fmt: skip
    model.train()(x.expand(2, -1, -1, -1))  # for inputs whose mean is observed
    allocator.step(0)
    return sc.compress(model.eval(), x)


def _prune(plain: nn.Module, x: Tensor, macs: int) -> nn.Module:
    """Prune by weights' magnitude, every layer by the same part, which is searched for."""
    import torch_pruning

    low, high, best = 0.0, 0.9, plain
    gap = math.inf
    for _ in range(8):
        part, model = (low + high) / 2, copy.deepcopy(plain)
        classes = [
            layer
            for layer in model.modules()
            if isinstance(layer, nn.Linear) or getattr(layer, "out_channels", None) == CLASSES
        ]
        torch_pruning.pruner.MagnitudePruner(
            model,
            x,
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=part,
            ignored_layers=classes,
        ).step()
        over = sc.count(model, x).macs / macs - 1
        low, high = (part, high) if over > 0 else (low, part)
        if abs(over) < gap:
            gap, best = abs(over), model
    return best


ONE = {"": Subject()}
SECTIONS: dict[str, tuple[dict[str, Subject], Callable[[Subject, int], Rows]]] = {
    "step": (STEP, measure_step),
    "masked": (MASKED, measure_infer),
    "trainer": (ONE, measure_both_trainers),
    "compressed": (COMPRESSED, measure_compressed),
    "pruning": (PRUNING, measure_pruning),
    "shifts": (SHIFTS, partial(measure_infer, runtime="onnxruntime")),
    "alloc": ({"": Subject("densenet_bc190")}, measure_alloc),
}


def read(section: str) -> Rows:
    """Read what was measured."""
    path = RESULTS / f"speed_{section}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(section: str, repeats: int) -> None:
    """Measure a section and save it, network by network."""
    subjects, run = SECTIONS[section]
    for name, subject in subjects.items():
        with num_threads(1):
            rows = [{"network": name, **line} for line in run(subject, repeats)]
        kept = [line for line in read(section) if line["network"] != name]
        text = "".join(json.dumps(line) + "\n" for line in [*kept, *rows])
        (RESULTS / f"speed_{section}.jsonl").write_text(text)
        for line in rows:
            print(f"{line['value']:8.4g} {line['unit']}  {line['case']}", flush=True)


def _table(heads: str, rows: Iterable[Sequence[str]], texts: int, note: str = "") -> str:
    """Write a table in Markdown; the first `texts` columns are texts, the others figures."""
    names = heads.split("|")
    marks = ["---"] * texts + ["---:"] * (len(names) - texts)
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    lines.insert(1, f"|{'|'.join(marks)}|")
    return "\n".join([*lines, *(["", note] if note else [])])


def _cell(rows: Rows, words: str) -> str:
    """Return the median and the spread of the line whose case has these words."""
    for line in rows:
        if words in line["case"]:
            low, high = line["spread"]
            return f"{line['value']:.2f} ({low:.2f} to {high:.2f})"
    return "-"


def _of(rows: Rows, **what: Any) -> Rows:
    return [line for line in rows if all(line[key] == value for key, value in what.items())]


def _when(rows: Rows) -> str:
    counts = {line["n"] for line in rows}
    n = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"n = {n}; {max(line['date'] for line in rows)}"


_MEDIAN = "Median (smallest to largest)"
_BY_BATCH = "|".join(f"{words}, {batch}" for words in ("eager", "ONNX") for batch in BATCHES)


def step_table() -> str:
    """Training steps of converted networks, and masked evaluation."""
    step, masked = read("step"), read("masked")
    cases = [
        (step, name, f"training step, 20% moved, batch {subject.batch_size}", "moved")
        for name, subject in STEP.items()
    ] + [
        (masked, name, f"masked evaluation, {words}, batch 1", kind)
        for name in MASKED
        for kind, words in (("moved", "20% moved"), ("closed", "half closed"))
    ]
    rows = [
        [name, what, *(_cell(_of(lines, network=name), f"{layout}: {KINDS[kind]}")
                       for layout in LAYOUTS)]
        for lines, name, what, kind in cases
    ]  # fmt: skip
    note = f"{_MEDIAN}; {_when([*step, *masked])}."
    return _table("network|what|NCHW|channels last", rows, 2, note)


def trainer_table() -> str:
    """The trainer's speed over a plain loop."""
    lines = read("trainer")
    rows = [
        (way, _cell([line], "speed over"))
        for line, way in zip(lines[2::3], ("as it is", "with `--compile`"), strict=True)
    ]
    what = "`selectconv train --method plain` on DenseNet-40"
    heads = f"{what}: speed relative to a plain eager NCHW loop|higher is faster"
    return _table(heads, rows, 1, f"{_MEDIAN}; {_when(lines)}.")


def compressed_table() -> str:
    """Compressed networks, by runtime and batch."""
    lines = _of(read("compressed"), round_to="None")
    rows = [
        (name, f"{own[0]['macs_ratio']:.2f}", *(f"{line['value']:.2f}" for line in own))
        for name in COMPRESSED
        if (own := _of(lines, network=name))
    ]
    largest = max(line["value"] for line in lines)
    note = f"The largest median is {largest:.2f}; {_when(lines)}."
    return _table(f"network|multiply-adds|{_BY_BATCH}", rows, 1, note)


def shifts_table() -> str:
    """Shifts in ONNX Runtime."""
    lines, rows = read("shifts"), []
    for (name, subject), kind in product(SHIFTS.items(), ("moved", "whole")):
        words = f"compressed, {KINDS[kind]} "
        own = [line for line in _of(lines, network=name) if words in f"{line['case']} "]
        side, shifts = subject.image_size, {"moved": "learned", "whole": "whole pixels"}[kind]
        macs = f"{own[0]['macs_ratio']:.2f}"
        rows.append((f"{name}, {side}x{side}", shifts, _cell(own, ""), macs))
    return _table("network|shifts|time|multiply-adds", rows, 2, f"{_MEDIAN}; {_when(lines)}.")


def pruning_table() -> str:
    """Half of the multiply-adds, beside Torch-Pruning."""
    lines, rows = read("pruning"), []
    runtimes = ("eager", "ONNX", "OpenVINO")
    by_batch = "|".join(f"{words}, {batch}" for words in runtimes for batch in BATCHES[:2])
    for name, way in product(PRUNING, WAYS):
        own = _of(lines, network=name, way=way)
        if not own:
            continue
        sizes = (f"{own[0][key]:.2f}" for key in ("macs_ratio", "params_ratio"))
        rows.append((name, way, *sizes, *(f"{line['value']:.2f}" for line in own)))
    heads = f"network|way|multiply-adds|parameters|{by_batch}"
    return _table(heads, rows, 2, f"{_when(lines)}.")


def halves_table() -> str:
    """Half of the multiply-adds: the smallest and the largest time of all networks."""
    lines, rows = read("pruning"), []
    for way in WAYS:
        times = [
            [line["value"] for line in _of(lines, way=way, runtime=runtime)]
            for runtime in (*RUNTIMES, "openvino")
        ]
        rows.append([way, *(f"{min(own):.2f} to {max(own):.2f}" for own in times)])
    return _table("way|eager|ONNX Runtime|OpenVINO", rows, 1, f"{_when(lines)}.")


TABLES = {
    "halves": halves_table,
    "pruning": pruning_table,
    "step": step_table,
    "trainer": trainer_table,
    "compressed": compressed_table,
    "shifts": shifts_table,
}


def write_tables() -> None:
    """Replace the tables of the pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            begin, end = f"<!-- begin of {name} -->\n", f"<!-- end of {name} -->"
            before, marker, rest = text.partition(begin)
            if marker:
                text = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
        page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import torchvision_shim  # lets timm be imported with torch for CPUs

    torchvision_shim.install()
    if not options.tables:
        for section in options.sections or SECTIONS:
            measure(section, options.repeats)
    write_tables()


if __name__ == "__main__":
    main()
