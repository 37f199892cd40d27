"""Eq. (2): the expected channel damage matrix (ECDM), its root-mean-square relative, and nECDM."""

from collections.abc import Callable

import torch
from torch import Tensor

from selectconv.checks import check_count
from selectconv.core.tensors import check_tensor
from selectconv.errors import BadValue


def ecdm(weight: Tensor, mean: Tensor, groups: int = 1) -> Tensor:
    """Compute the expected channel damage matrix, Eq. (2): `E[X_i] * sum_k W[i, :, k]`.

    Args:
        weight: a conv weight in torch's layout (O, I / groups, ...).
        mean: (I,), E[X] of each input slot.
        groups: the conv's groups.

    Returns:
        (I, O); zero where slot i does not feed output j.

    Raises:
        TypeError, ValueError: the shapes do not fit together.

    Example:
        >>> import torch
        >>> ecdm(torch.ones(1, 2, 3, 3), torch.tensor([1.0, 2.0]))
        tensor([[ 9.],
                [18.]])
    """
    _check_weight(weight, groups, mean=mean)
    return _slots_by_outputs(_kernels(weight).sum(dim=2), groups) * mean[:, None]


def rms_damage(weight: Tensor, mean: Tensor, var: Tensor, groups: int = 1) -> Tensor:
    """Compute the root mean square of what each slot adds to each output.

    `sqrt(Var[X_i] * sum_k W^2 + (E[X_i] * sum_k W)^2)`, assuming that pixels are independent.
    Unlike ECDM, it also measures kernels that sum to zero and inputs of mean zero.

    Args:
        weight: a conv weight in torch's layout (O, I / groups, ...).
        mean: (I,), E[X] of each input slot.
        var: (I,), Var[X] of each input slot.
        groups: the conv's groups.

    Returns:
        (I, O); zero where slot i does not feed output j.

    Raises:
        TypeError, ValueError: the shapes do not fit together.

    Example:
        >>> import torch
        >>> edge = torch.tensor([[[[-1.0, 0.0, 1.0]]]])
        >>> mean, var = torch.tensor([5.0]), torch.tensor([2.0])
        >>> ecdm(edge, mean), rms_damage(edge, mean, var)
        (tensor([[0.]]), tensor([[2.0000]]))
    """
    _check_weight(weight, groups, mean=mean, var=var)
    kernel = _kernels(weight)
    norm = _slots_by_outputs(torch.linalg.vector_norm(kernel, dim=2), groups)
    total = _slots_by_outputs(kernel.sum(dim=2), groups)
    # hypot: the squares of small weights would vanish in float32.
    return torch.hypot(norm * var.clamp(min=0.0).sqrt()[:, None], total * mean[:, None])


def normalize_ecdm(ecdm: Tensor) -> Tensor:
    """Compute nECDM (Section 2.3): absolute values, with each output's column summing to 1.

    Args:
        ecdm: (I, O). A column of zeros stays zero.

    Raises:
        TypeError, ValueError: `ecdm` is not a floating matrix.

    Example:
        >>> import torch
        >>> normalize_ecdm(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))
        tensor([[0.2500, 0.0000],
                [0.7500, 0.0000]])
    """
    check_tensor("ecdm", ecdm, (None, None))
    if ecdm.shape[0] == 0:
        return ecdm.clone()
    size = ecdm.abs()
    total = size.sum(dim=0)
    if not bool((((total > 1e-30) & (total < 1e30)) | (total == 0)).all()):
        # Against the column's largest first: sums can neither overflow nor vanish in subnormals.
        largest = size.amax(dim=0)
        size = size.div_(torch.where(largest == 0, 1.0, largest))
        total = size.sum(dim=0)
    return size.div_(torch.where(total == 0, 1.0, total))


def expected_damage(
    weight: Tensor, moment: Callable[[str], Tensor], damage: str, is_signed: bool, groups: int = 1
) -> Tensor:
    """Compute the damage of closing each input of a layer, (I, O): Eq. (2) for "mean".

    Args:
        weight: the layer's, (O, I / groups, ...).
        moment: computes "mean" or "var" of each input, (I,).
        damage: "mean", "rms", or "auto".
        is_signed: whether the input may be negative: "auto" is then rms.
        groups: of the layer.
    """
    mean = moment("mean")
    if damage == "rms" or (damage == "auto" and is_signed):
        return rms_damage(weight, mean, moment("var"), groups)
    return ecdm(weight, mean, groups)


def _check_weight(weight: Tensor, groups: int, **moments: Tensor) -> None:
    check_tensor("weight", weight, (None,) * getattr(weight, "ndim", 0))
    if weight.ndim < 2:
        raise BadValue(f"`weight` must be (O, I / groups, ...), got {tuple(weight.shape)}.")
    check_count("groups", groups, 1)
    if weight.shape[0] % groups:
        raise BadValue(f"`groups`={groups} must divide the {weight.shape[0]} outputs of `weight`.")
    for name, moment in moments.items():
        check_tensor(name, moment, (weight.shape[1] * groups,), match="weight` and `groups")


def _kernels(weight: Tensor) -> Tensor:
    """View a weight as (O, I / groups, positions), in float32 at least."""
    flat = weight.flatten(2) if weight.ndim > 2 else weight[:, :, None]
    return flat.to(torch.promote_types(weight.dtype, torch.float32))


def _slots_by_outputs(value: Tensor, groups: int) -> Tensor:
    """Spread (O, I / groups) over (I, O), zero where a slot does not feed an output."""
    if groups == 1:
        return value.t()
    outputs, width = value.shape[0] // groups, value.shape[1]
    spread = value.new_zeros(groups, width, groups, outputs)
    group = torch.arange(groups, device=value.device)
    spread[group, :, group, :] = value.view(groups, outputs, width).transpose(1, 2)
    return spread.view(groups * width, groups * outputs)
