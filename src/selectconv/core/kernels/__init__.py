"""Fast paths of SelectChannel: C on the CPU, Triton on CUDA; `selectconv.core.shift` defines them.

None of them is needed: where a kernel cannot run, the layers compute the definition with torch's
own operations. `describe_path` says which one runs, and why.
"""

from selectconv.core.kernels.cpu import can_run, norm_relu_select, select, tap
from selectconv.core.kernels.describe import describe_path
from selectconv.core.kernels.switch import simple_path

__all__ = ["can_run", "describe_path", "norm_relu_select", "select", "simple_path", "tap"]
