"""`selectconv bench infer`: masked and compressed networks over the plain one."""

from functools import partial

import torch
from torch import nn

from selectconv.deploy.compress import compress
from selectconv.deploy.cost import count
from selectconv.lab.bench.subject import KINDS, LAYOUTS, Subject
from selectconv.lab.bench.timing import Rows, compare, open_network


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
            if kind in ("moved", "closed"):
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
