"""Selective convolutions: CNNs that use the parameters they have.

After "Training CNNs with Selective Allocation of Channels" (ICML 2019), and beyond it.
"""

from importlib.metadata import PackageNotFoundError, version

from selectconv import functional
from selectconv.allocate.allocator import ChannelAllocator
from selectconv.allocate.damage import observe_damage
from selectconv.allocate.param_groups import param_groups
from selectconv.allocate.report import AllocationReport
from selectconv.conversion.convert import convert
from selectconv.conversion.description import describe
from selectconv.core.allocation import AllocationPlan
from selectconv.core.layer import SelectConv1d, SelectConv2d, SelectConv3d
from selectconv.core.mean_source import (
    BatchNormMean,
    ConcatMean,
    ConstantMean,
    ObservedMean,
    SelectedMean,
)
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
from selectconv.zoo import create_model, list_models

try:
    __version__ = version("selectconv")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

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
