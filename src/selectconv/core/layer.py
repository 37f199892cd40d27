"""Section 2.2's layer in one, two and three dimensions."""

from torch import nn

from selectconv.core.select_conv import DAMAGES as DAMAGES
from selectconv.core.select_conv import SelectConvNd as SelectConvNd


class SelectConv1d(SelectConvNd, nn.Conv1d):
    """`nn.Conv1d` with channel selectivity; `shift` is (I, 1). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv1d(8, 4, kernel_size=3)(torch.zeros(1, 8, 10)).shape
        torch.Size([1, 4, 8])
    """


class SelectConv2d(SelectConvNd, nn.Conv2d):
    """`nn.Conv2d` with channel selectivity (Section 2.2): same arguments, plus `reallocate`.

    A fresh layer computes exactly what the plain conv computes.

    Example:
        >>> import selectconv as sc, torch
        >>> bn = torch.nn.BatchNorm2d(8)
        >>> conv = SelectConv2d(8, 4, kernel_size=1)
        >>> conv.mean_source = sc.BatchNormMean(bn, torch.relu)
        >>> with torch.no_grad():
        ...     _ = conv.weight[:, 2:4].zero_()
        >>> conv.dealloc(gamma=1e-3)
        tensor([2, 3])
        >>> conv.realloc()
        tensor([2, 3])
        >>> int(conv.moved.sum()), bool(conv.gate.all())
        (2, True)
    """


class SelectConv3d(SelectConvNd, nn.Conv3d):
    """`nn.Conv3d` with channel selectivity; `shift` is (I, 3). See `SelectConv2d`.

    Example:
        >>> import torch
        >>> SelectConv3d(8, 4, kernel_size=1)(torch.zeros(1, 8, 2, 3, 4)).shape
        torch.Size([1, 4, 2, 3, 4])
    """
