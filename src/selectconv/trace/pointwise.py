"""A 1x1 convolution as the matrix product that it is."""

import operator

import torch
from torch import Tensor, fx, nn


class Pointwise2d(nn.Conv2d):
    """`nn.Conv2d` for 1x1 kernels without stride, padding or groups, and the sum behind it.

    On a CPU and a contiguous input it multiplies matrices: torch's conv brings the input into a
    layout of its own first, which takes longer than the product where channels are few
    (benchmarks/compressed_time.py). Everywhere else it is the conv.

    Example:
        >>> conv, x = Pointwise2d(3, 2, 1), torch.randn(1, 3, 4, 4)
        >>> torch.testing.assert_close(conv(x), nn.Conv2d.forward(conv, x))
    """

    def forward(self, input: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Convolve, and add the result to `add_to`, which is lost: at inference it is reused."""
        if input.device.type != "cpu" or input.ndim != 4 or not input.is_contiguous():
            plain = super().forward(input)
            return plain if add_to is None else add_to + plain
        # torch.matmul would copy the input, as it folds batches where a weight requires gradients.
        weight = self.weight.flatten(1).expand(len(input), -1, -1)
        bias = None if self.bias is None else self.bias[:, None]
        shape = (len(input), self.out_channels, *input.shape[2:])
        can_reuse = not torch.is_grad_enabled() and bias is None
        if add_to is not None and can_reuse and add_to.is_contiguous() and add_to.shape == shape:
            total = add_to.flatten(2)  # a view
            torch.baddbmm(total, weight, input.flatten(2), out=total)
            return add_to
        if bias is None:
            out = torch.bmm(weight, input.flatten(2))
        else:
            out = torch.baddbmm(bias, weight, input.flatten(2))
        return out.view(shape) if add_to is None else add_to + out.view(shape)

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


def split_sums(graph: fx.Graph, root: nn.Module) -> None:
    """Write the sums behind pointwise convs as operations of their own."""
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.args) != 2:
            continue
        if not isinstance(root.get_submodule(str(node.target)), Pointwise2d):
            continue
        users = list(node.users)
        with graph.inserting_after(node):
            total = graph.call_function(operator.add, (node.args[1], node))
        node.args = node.args[:1]
        for user in users:
            user.replace_input_with(node, total)
