"""Selective convolutions: CNNs that use the parameters they have.

After "Training CNNs with Selective Allocation of Channels" (ICML 2019), and beyond it. A name is
imported when it is first used, so that `selectconv --version` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selectconv import functional
    from selectconv.allocate.allocator import ChannelAllocator
    from selectconv.allocate.damage import observe_damage
    from selectconv.allocate.param_groups import param_groups
    from selectconv.allocate.report import AllocationReport
    from selectconv.core.layer import SelectConv1d, SelectConv2d, SelectConv3d
    from selectconv.core.mean_source import (
        BatchNormMean,
        ConcatMean,
        ConstantMean,
        ObservedMean,
        SelectedMean,
    )
    from selectconv.core.plan import AllocationPlan
    from selectconv.deploy.compress import compress
    from selectconv.deploy.compressed_file import load_compressed, save_compressed
    from selectconv.deploy.cost import Cost, CostCounter, count
    from selectconv.deploy.onnx import export_onnx
    from selectconv.errors import (
        AllocationError,
        CompressionError,
        ConversionError,
        ExportError,
        MeanSourceError,
        SelectConvError,
        SelectConvWarning,
    )
    from selectconv.graph.convert import convert
    from selectconv.graph.description import describe
    from selectconv.lab.zoo import create_model, list_models

    __version__: str

__all__ = [
    "AllocationError",
    "AllocationPlan",
    "AllocationReport",
    "BatchNormMean",
    "ChannelAllocator",
    "CompressionError",
    "ConcatMean",
    "ConstantMean",
    "ConversionError",
    "Cost",
    "CostCounter",
    "ExportError",
    "MeanSourceError",
    "ObservedMean",
    "SelectConv1d",
    "SelectConv2d",
    "SelectConv3d",
    "SelectConvError",
    "SelectConvWarning",
    "SelectedMean",
    "__version__",
    "compress",
    "convert",
    "count",
    "create_model",
    "describe",
    "export_onnx",
    "functional",
    "list_models",
    "load_compressed",
    "observe_damage",
    "param_groups",
    "save_compressed",
]

# Where each public name lives.
_HOMES = {
    name: f"selectconv.{module}"
    for module, names in {
        "allocate.allocator": "ChannelAllocator",
        "allocate.damage": "observe_damage",
        "allocate.param_groups": "param_groups",
        "allocate.report": "AllocationReport",
        "graph.convert": "convert",
        "graph.description": "describe",
        "core.layer": "SelectConv1d SelectConv2d SelectConv3d",
        "core.mean_source": "BatchNormMean ConcatMean ConstantMean ObservedMean SelectedMean",
        "core.plan": "AllocationPlan",
        "deploy.compress": "compress",
        "deploy.compressed_file": "load_compressed save_compressed",
        "deploy.cost": "Cost CostCounter count",
        "deploy.onnx": "export_onnx",
        "errors": "AllocationError CompressionError ConversionError ExportError MeanSourceError "
        "SelectConvError SelectConvWarning",
        "lab.zoo": "create_model list_models",
    }.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and a wrong one from them

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value: Any = _find_version()
        elif name == "functional":
            value = import_module("selectconv.functional")
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module 'selectconv' has no attribute {name!r}")
        globals()[name] = value  # the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("selectconv")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
