"""The public names for type checkers and editors: those of `__init__.py`, each from its home."""

from selectconv import functional as functional
from selectconv.allocate.allocator import ChannelAllocator as ChannelAllocator
from selectconv.allocate.damage import observe_damage as observe_damage
from selectconv.allocate.optimizers import param_groups as param_groups
from selectconv.allocate.report import AllocationReport as AllocationReport
from selectconv.core.layer import SelectConv1d as SelectConv1d
from selectconv.core.layer import SelectConv2d as SelectConv2d
from selectconv.core.layer import SelectConv3d as SelectConv3d
from selectconv.core.mean_source import BatchNormMean as BatchNormMean
from selectconv.core.mean_source import ConcatMean as ConcatMean
from selectconv.core.mean_source import ConstantMean as ConstantMean
from selectconv.core.mean_source import ObservedMean as ObservedMean
from selectconv.core.mean_source import SelectedMean as SelectedMean
from selectconv.core.plan import AllocationPlan as AllocationPlan
from selectconv.deploy.compress import compress as compress
from selectconv.deploy.compressed_file import load_compressed as load_compressed
from selectconv.deploy.compressed_file import save_compressed as save_compressed
from selectconv.deploy.cost import Cost as Cost
from selectconv.deploy.cost import CostCounter as CostCounter
from selectconv.deploy.cost import count as count
from selectconv.deploy.onnx import export_onnx as export_onnx
from selectconv.errors import AllocationError as AllocationError
from selectconv.errors import CompressionError as CompressionError
from selectconv.errors import ConversionError as ConversionError
from selectconv.errors import ExportError as ExportError
from selectconv.errors import MeanSourceError as MeanSourceError
from selectconv.errors import SelectConvError as SelectConvError
from selectconv.errors import SelectConvWarning as SelectConvWarning
from selectconv.graph.convert import convert as convert
from selectconv.graph.convert import describe as describe
from selectconv.lab.zoo import create_model as create_model
from selectconv.lab.zoo import list_models as list_models

__version__: str
