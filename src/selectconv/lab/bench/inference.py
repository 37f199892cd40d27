"""`selectconv bench infer`: masked and compressed networks over the plain one."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.deploy.compress import compress
from selectconv.deploy.cost import count
from selectconv.deploy.onnx import export_onnx, open_session
from selectconv.lab.bench.interleave import in_turn, ratios, row
from selectconv.lab.bench.selective_cost import KINDS, LAYOUTS, Subject, build_network, draw_images

COMPRESSED = ("moved", "closed")

Run = Callable[[Tensor], object]


def measure_infer(
    repeats: int, subject: Subject | None = None, runtime: str = "eager"
) -> list[dict[str, Any]]:
    """Time the evaluation of a network: masked and compressed, over the plain one.

    In ONNX Runtime there are no masked networks: what is exported is compressed.

    Args:
        repeats: measurements of each side.
        subject: what to measure; None: DenseNet-40.
        runtime: "eager", "compile" or "onnxruntime".
    """
    subject = subject or Subject()
    plain = build_network(subject.model, "plain", subject.image_size).eval()
    layouts = LAYOUTS if runtime == "eager" else {"NCHW": torch.contiguous_format}
    one = draw_images(subject, torch.contiguous_format)[:1]
    dense = count(plain, one).macs
    rows = []
    for layout, memory_format in layouts.items():
        images = draw_images(subject, memory_format)
        networks = {"plain": plain, **_networks(subject, images, masked=runtime != "onnxruntime")}
        sides = {}
        for words, network in networks.items():
            network = network.to(memory_format=memory_format)  # type: ignore[call-overload]
            sides[words] = _call(_open(network, images, runtime), images)
        times = in_turn(sides, repeats)
        about = f"{subject.model}, {runtime}, batch {subject.batch_size}, {layout}"
        milliseconds = [seconds * 1e3 for seconds in times["plain"]]
        rows.append(row("infer", f"{about}: plain", milliseconds, "ms"))
        for words, network in networks.items():
            if network is not plain:
                line = row(
                    "infer", f"{about}: {words} / plain", ratios(times[words], times["plain"]), "x"
                )
                if words.startswith("compressed"):
                    line["macs_ratio"] = round(count(network, one).macs / dense, 4)
                rows.append(line)
    return rows


def _networks(subject: Subject, images: Tensor, *, masked: bool) -> dict[str, nn.Module]:
    """Build the networks to compare, by what the table calls them."""
    networks: dict[str, nn.Module] = {}
    for kind, words in KINDS.items():
        if kind == "plain":
            continue
        network = build_network(subject.model, kind, subject.image_size).eval()
        if masked:
            networks[words] = network
        if kind in COMPRESSED:
            networks[f"compressed, {words}"] = compress(network, images)
    return networks


def _open(network: nn.Module, images: Tensor, runtime: str) -> Run:
    if runtime == "compile":
        compiled: Run = torch.compile(network)
        return compiled
    if runtime == "onnxruntime":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            export_onnx(network, file, images)
            session: Run = open_session(file)
            return session
    return network


def _call(run: Run, images: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.inference_mode():
            run(images)

    return call
