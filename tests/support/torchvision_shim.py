"""Let torchvision import where its C++ library does not load (a CUDA build on a CPU-only torch).

Such a build fails with "operator torchvision::nms does not exist", and timm and lightning with it.
The two operators are declared, not implemented: models need neither. A torchvision that works, or
fails in another way, is left alone.
"""

import sys

import torch

_library: torch.library.Library | None = None  # what it declares lives as long as it does


def install() -> None:
    """Import torchvision, with its operators declared if need be; nothing where it is missing."""
    global _library
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            _library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
