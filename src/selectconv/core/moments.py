"""Eq. (1): mean and mean square of an activation of a normally distributed input.

Inside these formulas `beta` and `gamma` are batch norm's shift and scale, as in the paper;
everywhere else in the package `gamma` is the damage level of Algorithm 1.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selectconv.checks import check_callable
from selectconv.core.tensors import check_tensor
from selectconv.errors import BadValue

Activation = Callable[[Tensor], Tensor] | nn.Module

# The tails beyond 8.5 standard deviations are 2e-17, less than float64 can tell.
_REACH = 8.5
# Trapezoid steps across the reach. A kink of slope s costs at most s*h*h/12 times the density, with
# 1024 steps 1e-5 * |gamma|; smooth activations are exact long before.
_STEPS = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15)
_TOLERANCE = 5e-5  # half of the error that `expected_activation` promises
# Points at which an activation is evaluated at once: 32 MiB of float64.
_CHUNK = 1 << 22

_RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_)


def expected_relu(beta: Tensor, gamma: Tensor) -> Tensor:
    """Compute `E[ReLU(N(beta, gamma^2))]`, Eq. (1).

    With `t = beta / |gamma|` it is `|gamma| phi(t) + beta Phi(t)`.

    Args:
        beta: means, any shape.
        gamma: standard deviations; the sign is ignored. For 0 the result is `max(beta, 0)`.

    Returns:
        The expectations, in the broadcast shape and the wider dtype of the two.

    Raises:
        TypeError, ValueError: an argument is not a floating tensor, or the shapes do not broadcast.

    Example:
        >>> import torch
        >>> expected_relu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]))
        tensor([0.3989, 2.0000])
    """
    return expected_power(beta, gamma, torch.relu, power=1)


def _relu_moment(beta: Tensor, gamma: Tensor, power: int) -> Tensor:
    """Compute `E[ReLU(N(beta, gamma^2))^power]`; `rms_damage` needs the second moment."""
    scale = gamma.abs()
    ratio = beta / torch.where(gamma == 0, 1.0, scale)
    t = ratio.clamp(-40.0, 40.0)  # phi(40) is 0 in float64; keeps inf * 0 away
    density = torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    below_t = 0.5 * torch.special.erfc(-t / math.sqrt(2))  # Phi(t)
    # Left of zero the terms cancel. Phi(t) = phi(t) * M with Mills' ratio M, from the scaled erfcx
    # where nothing underflows, so their sum is phi(t) * (1 + t M), whose bracket loses 3 digits at
    # t = -35; that of the second moment loses 6.
    mills = math.sqrt(math.pi / 2) * torch.special.erfcx(-t.clamp(max=0.0) / math.sqrt(2))
    if power == 1:
        right = scale * density + beta * below_t
        left = scale * density * (1 + t * mills)
    else:
        right = (beta * beta + scale * scale) * below_t + beta * scale * density
        left = scale * scale * density * ((1 + t * t) * mills + t)
    expected = torch.where(t < 0, left, right)
    return torch.where(gamma == 0, beta.clamp(min=0.0) ** power, expected)


def expected_activation(beta: Tensor, gamma: Tensor, act: Activation | None) -> Tensor:
    """Compute `E[act(N(beta, gamma^2))]` for any elementwise activation.

    For ReLU it uses the closed form of Eq. (1). All other activations are integrated numerically,
    with an absolute error of at most `1e-4 * (1 + |gamma|)`, even if they have kinks.
    They must be continuous.

    Args:
        beta: means, any shape; (C,) for an `act` with parameters for each channel.
        gamma: standard deviations; the sign is ignored. Broadcasts with `beta`.
        act: an elementwise callable or module, or None for the identity. It gets a tensor
            (points, C), so one with parameters for each channel (`nn.PReLU(C)`) works, too.

    Raises:
        TypeError, ValueError: an argument is not a floating tensor, the shapes do not broadcast, or
            `act` is not elementwise.

    Example:
        >>> import torch
        >>> expected_activation(torch.tensor([0.5]), torch.tensor([2.0]), torch.nn.ReLU6())
        tensor([1.0709])
    """
    return expected_power(beta, gamma, act, power=1)


def expected_power(beta: Tensor, gamma: Tensor, act: Activation | None, power: int) -> Tensor:
    """Compute `E[act(N(beta, gamma^2))^power]` for a power of 1 or 2, as `expected_activation`.

    Example:
        >>> import torch
        >>> expected_power(torch.tensor([3.0]), torch.tensor([2.0]), None, power=2)
        tensor([13.])
    """
    beta, gamma, dtype = _normal(beta, gamma)
    if act is None:
        moment = beta if power == 1 else beta * beta + gamma * gamma
    elif is_relu(act):
        moment = _relu_moment(beta, gamma, power)
    else:
        moment = _integrate(beta, gamma, act, power)
    return moment.to(dtype)


def is_relu(act: Activation | None) -> bool:
    """Return whether an activation is ReLU, for which Eq. (1) is the closed form."""
    return type(act) is nn.ReLU or any(act is function for function in _RELU_FUNCTIONS)


def _normal(beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    check_tensor("beta", beta, (None,) * getattr(beta, "ndim", 0))
    check_tensor("gamma", gamma, (None,) * getattr(gamma, "ndim", 0))
    dtype = torch.promote_types(beta.dtype, gamma.dtype)
    try:
        beta, gamma = torch.broadcast_tensors(beta, gamma)
    except RuntimeError:
        raise BadValue(
            "`beta` and `gamma` must have shapes that broadcast, "
            f"got {tuple(beta.shape)} and {tuple(gamma.shape)}."
        ) from None
    # A handful of numbers a layer: float64 costs nothing, where the device has it (MPS does not).
    exact = torch.float32 if beta.device.type == "mps" else torch.float64
    return beta.to(exact), gamma.to(exact), dtype


def _integrate(beta: Tensor, gamma: Tensor, act: Activation, power: int) -> Tensor:
    """Integrate `act(beta + gamma z)^power` against the normal density with the trapezoid rule.

    The steps are halved until that changes nothing that matters.
    """
    check_callable("act", act)
    shape = beta.shape
    parameters = act.parameters() if isinstance(act, nn.Module) else ()
    if len(shape) != 1 and any(parameter.numel() > 1 for parameter in parameters):
        raise BadValue(
            "`beta` and `gamma` must be (C,) for an `act` with parameters for each channel, "
            f"got shape {tuple(shape)}."
        )
    beta, gamma = beta.flatten(), gamma.flatten()
    tolerance = _TOLERANCE * (1 + gamma.abs()) ** power
    for steps in _STEPS:
        estimate, change = _trapezoid(beta, gamma, act, power, steps)
        if bool((change <= tolerance + 1e-6 * estimate.abs()).all()):
            break
    return estimate.view(shape)


def _trapezoid(
    beta: Tensor, gamma: Tensor, act: Activation, power: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Compute the estimate, and a bound on what halving the step changed in it: (C,) each."""
    z = torch.arange(steps + 1).to(beta) * (2 * _REACH / steps) - _REACH
    weight = torch.exp(-0.5 * z * z)
    scale = weight[:-1].sum()
    total = change = torch.zeros_like(beta)
    rows = max(2, _CHUNK // max(1, len(beta)) // 2 * 2)
    for start in range(0, steps, rows):  # neighbouring parts share a node
        nodes = z[start : start + rows + 1]
        value = _evaluate(beta + gamma * nodes[:, None], act, power)
        mass = weight[start : start + len(value) - 1]
        total = total + mass @ value[:-1]
        deviation = value[1::2] - (value[:-1:2] + value[2::2]) / 2
        change = change + mass[1::2] @ deviation.abs()
    return total / scale, change / scale


def _evaluate(points: Tensor, act: Activation, power: int) -> Tensor:
    """Compute `act(points)^power`; `points` are ours, so activations may work in place."""
    # A module with weights of its own (PReLU) computes in their dtype.
    parameters = act.parameters() if isinstance(act, nn.Module) else iter(())
    value = act(points.to(next(parameters, points).dtype))
    if not isinstance(value, Tensor) or value.shape != points.shape:
        wanted = tuple(points.shape)
        raise BadValue(f"`act` must be elementwise: {act!r} did not keep shape {wanted}.")
    return value.to(points.dtype) ** power
