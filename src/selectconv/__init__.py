"""Selective convolutions: CNNs that use the parameters they have.

After "Training CNNs with Selective Allocation of Channels" (ICML 2019), and beyond it.
"""

from importlib.metadata import PackageNotFoundError, version

from selectconv import functional
from selectconv.allocation import AllocationPlan
from selectconv.allocator import AllocationReport, ChannelAllocator
from selectconv.convert import convert, describe
from selectconv.damage import observe_damage
from selectconv.errors import (
    AllocationError,
    ConversionError,
    MeanSourceError,
    SelectConvError,
    SelectConvWarning,
)
from selectconv.layer import SelectConv1d, SelectConv2d, SelectConv3d
from selectconv.mean_source import BatchNormMean, ConcatMean, ConstantMean, ObservedMean
from selectconv.param_groups import param_groups
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
    "ConcatMean",
    "ConstantMean",
    "ConversionError",
    "MeanSourceError",
    "ObservedMean",
    "SelectConv1d",
    "SelectConv2d",
    "SelectConv3d",
    "SelectConvError",
    "SelectConvWarning",
    "__version__",
    "convert",
    "create_model",
    "describe",
    "functional",
    "list_models",
    "observe_damage",
    "param_groups",
]
