"""The CNNs of timm as in `architectures`, but without ONNX, which takes nine tenths of the time."""

import random
from pathlib import Path

from soak import architectures
from soak.driver import Ended

COUNT, LIMIT_S = architectures.COUNT, architectures.LIMIT_S


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Take a network of timm through all steps before ONNX."""
    return architectures.walk(number, scratch, onnx=False)
