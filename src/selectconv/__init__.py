"""Selective convolutions: CNNs that use the parameters they have.

After "Training CNNs with Selective Allocation of Channels" (ICML 2019), and beyond it. A name is
imported when it is first used, so that `selectconv --version` does not wait for torch. Type
checkers read `__init__.pyi`, which says the same.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("selectconv")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

# Where each public name lives.
_HOMES = {
    name: f"selectconv.{module}"
    for module, names in {
        "allocate.allocator": "ChannelAllocator",
        "allocate.damage": "observe_damage",
        "allocate.optimizers": "param_groups",
        "allocate.report": "AllocationReport",
        "core.layer": "SelectConv1d SelectConv2d SelectConv3d",
        "core.mean_source": "BatchNormMean ConcatMean ConstantMean ObservedMean SelectedMean",
        "core.plan": "AllocationPlan",
        "deploy.compress": "compress",
        "deploy.compressed_file": "load_compressed save_compressed",
        "deploy.cost": "Cost CostCounter count",
        "deploy.onnx": "export_onnx",
        "errors": "AllocationError CompressionError ConversionError ExportError MeanSourceError "
        "SelectConvError SelectConvWarning",
        "graph.convert": "convert describe",
        "lab.zoo": "create_model list_models",
    }.items()
    for name in names.split()
}
__all__ = sorted([*_HOMES, "__version__", "functional"])


def __getattr__(name: str) -> Any:
    if name == "functional":
        return import_module("selectconv.functional")
    if name not in _HOMES:
        raise AttributeError(f"module 'selectconv' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
