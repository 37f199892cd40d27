"""A 1x1 convolution as the matrix product that it is."""

import torch
from torch import Tensor, nn


class Pointwise2d(nn.Conv2d):
    """`nn.Conv2d` for 1x1 kernels without stride, padding or groups.

    On a CPU and a contiguous input it multiplies matrices: torch's conv brings the input into a
    layout of its own first, which takes longer than the product where channels are few
    (benchmarks/compressed_time.py). Everywhere else it is the conv.

    Example:
        >>> conv, x = Pointwise2d(3, 2, 1), torch.randn(1, 3, 4, 4)
        >>> torch.testing.assert_close(conv(x), nn.Conv2d.forward(conv, x))
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        if input.device.type != "cpu" or input.ndim != 4 or not input.is_contiguous():
            plain: Tensor = super().forward(input)
            return plain
        # torch.matmul would copy the input, as it folds batches where a weight requires gradients.
        weight = self.weight.flatten(1).expand(len(input), -1, -1)
        if self.bias is None:
            out = torch.bmm(weight, input.flatten(2))
        else:
            out = torch.baddbmm(self.bias[:, None], weight, input.flatten(2))
        return out.view(len(input), -1, *input.shape[2:])

    @classmethod
    def can_replace(cls, conv: nn.Module) -> bool:
        """Tell whether a conv is of the kind that this class computes."""
        return (
            type(conv) is nn.Conv2d
            and conv.kernel_size == (1, 1)
            and conv.stride == (1, 1)
            and conv.groups == 1
            and (isinstance(conv.padding, str) or not any(conv.padding))
        )
