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

Activation = Callable[[Tensor], Tensor] | nn.Module

# The normal distribution beyond 8.5 standard deviations holds 2e-17: nothing in float64.
_REACH = 8.5
# Trapezoid steps across the reach. A kink of slope s costs at most s*h*h/12 times the density, with
# 1024 steps 1e-5 * |gamma|; smooth activations are exact long before. What is left after two
# halvings is mostly jumps, which are then looked for.
_FEWEST_STEPS, _JUMPS_FROM, _MOST_STEPS = 1024, 4096, 1 << 15
# A jump is looked for where a pair of steps deviates this much more than its neighbours, and is
# bisected while its height is this part of what the pair changes by: that of a slope soon is not.
_OUTSTANDING, _BISECTIONS, _STILL_A_JUMP = 4.0, 30, 1e-3
# Where `_probe` looks inside a step: stairs with one tread per step look straight at the nodes;
# between two nodes, at the golden section, they do not.
_PROBED, _GOLDEN = (-1.1, -0.3, 0.4, 1.3), (3 - math.sqrt(5)) / 2
_TOLERANCE = 5e-5  # half of what is promised
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
    beta, gamma, dtype = _normal(beta, gamma)
    scale, t = _scale_and_ratio(beta, gamma)
    density = torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    above = scale * density + beta * _cdf(t)
    # Left of zero the two terms cancel. Phi(t) = phi(t) * M with Mills' ratio M, so their sum is
    # phi(t) * (1 + t M), whose bracket loses 3 digits at t = -35.
    below = scale * density * (1 + t * _mills(t))
    expected = torch.where(t < 0, below, above)
    return torch.where(gamma == 0, beta.clamp(min=0.0), expected).to(dtype)


def expected_square_relu(beta: Tensor, gamma: Tensor) -> Tensor:
    """Compute `E[ReLU(N(beta, gamma^2))^2]`, the second moment that `rms_damage` needs.

    Example:
        >>> import torch
        >>> expected_square_relu(torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0.5000])
    """
    beta, gamma, dtype = _normal(beta, gamma)
    scale, t = _scale_and_ratio(beta, gamma)
    density = torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
    above = (beta * beta + scale * scale) * _cdf(t) + beta * scale * density
    # As in `expected_relu`; here the bracket loses 6 digits at t = -35.
    below = scale * scale * density * ((1 + t * t) * _mills(t) + t)
    second = torch.where(t < 0, below, above)
    return torch.where(gamma == 0, beta.clamp(min=0.0) ** 2, second).to(dtype)


def expected_activation(beta: Tensor, gamma: Tensor, act: Activation | None) -> Tensor:
    """Compute `E[act(N(beta, gamma^2))]` for any elementwise activation.

    For ReLU it uses the closed form of Eq. (1). All other activations are integrated numerically,
    with an absolute error of at most `1e-4 * (1 + |gamma|)`, even if they have kinks.

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
    if act is None:
        beta, _, dtype = _normal(beta, gamma)
        return beta.to(dtype)
    if is_relu(act):
        return expected_relu(beta, gamma)
    return _integrate(beta, gamma, act, power=1)


def expected_square_activation(beta: Tensor, gamma: Tensor, act: Activation | None) -> Tensor:
    """Compute `E[act(N(beta, gamma^2))^2]`, as `expected_activation` does for the first moment.

    Example:
        >>> import torch
        >>> expected_square_activation(torch.tensor([3.0]), torch.tensor([2.0]), None)
        tensor([13.])
    """
    if act is None:
        beta, gamma, dtype = _normal(beta, gamma)
        return (beta * beta + gamma * gamma).to(dtype)
    if is_relu(act):
        return expected_square_relu(beta, gamma)
    return _integrate(beta, gamma, act, power=2)


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
        raise ValueError(
            "`beta` and `gamma` must have shapes that broadcast, "
            f"got {tuple(beta.shape)} and {tuple(gamma.shape)}."
        ) from None
    # A handful of numbers a layer: float64 costs nothing, where the device has it (MPS does not).
    exact = torch.float32 if beta.device.type == "mps" else torch.float64
    return beta.to(exact), gamma.to(exact), dtype


def _scale_and_ratio(beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    scale = gamma.abs()
    ratio = beta / torch.where(gamma == 0, 1.0, scale)
    return scale, ratio.clamp(-40.0, 40.0)  # phi(40) is 0 in float64; keeps inf * 0 away


def _cdf(t: Tensor) -> Tensor:
    tail: Tensor = torch.special.erfc(-t / math.sqrt(2))
    return 0.5 * tail


def _mills(t: Tensor) -> Tensor:
    """Mills' ratio `Phi(t) / phi(t)` for t <= 0, from the scaled erfcx: nothing underflows."""
    scaled: Tensor = torch.special.erfcx(-t.clamp(max=0.0) / math.sqrt(2))
    return math.sqrt(math.pi / 2) * scaled


def _integrate(beta: Tensor, gamma: Tensor, act: Activation, power: int) -> Tensor:
    """Integrate `act(beta + gamma z)^power` against the normal density with the trapezoid rule.

    The steps are halved until that changes nothing that matters.
    """
    beta, gamma, dtype = _normal(beta, gamma)
    check_callable("act", act)
    shape = beta.shape
    parameters = act.parameters() if isinstance(act, nn.Module) else ()
    if len(shape) != 1 and any(parameter.numel() > 1 for parameter in parameters):
        raise ValueError(
            "`beta` and `gamma` must be (C,) for an `act` with parameters for each channel, "
            f"got shape {tuple(shape)}."
        )
    beta, gamma = beta.flatten(), gamma.flatten()
    tolerance = _TOLERANCE * (1 + gamma.abs()) ** power
    steps = _FEWEST_STEPS
    while True:
        estimate, change = _trapezoid(beta, gamma, act, power, steps, tolerance)
        enough = tolerance + 1e-6 * estimate.abs()
        if steps >= _MOST_STEPS or (
            bool((change <= enough).all())
            and bool((_probe(beta, gamma, act, power, steps) <= enough).all())
        ):
            return estimate.to(dtype).view(shape)
        steps *= 2


def _trapezoid(
    beta: Tensor, gamma: Tensor, act: Activation, power: int, steps: int, tolerance: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the estimate, and what its odd nodes changed in it: (C,) each.

    The changes are summed without their signs: two jumps, both half a step off, may change nothing
    together. Jumps that are looked for are integrated exactly, and count no more.
    """
    z = torch.arange(steps + 1).to(beta) * (2 * _REACH / steps) - _REACH
    weight = torch.exp(-0.5 * z * z)
    scale = weight[:-1].sum()
    total, change = torch.zeros_like(beta), torch.zeros_like(beta)
    rows = max(2, _CHUNK // max(1, len(beta)) // 2 * 2)
    allowed = tolerance * scale * min(1.0, rows / steps)
    for start in range(0, steps, rows):  # neighbouring parts share a node
        nodes = z[start : start + rows + 1]
        value = _evaluate(beta + gamma * nodes[:, None], act, power)
        mass = weight[start : start + len(value) - 1]
        total = total + mass @ value[:-1]
        deviation = value[1::2] - (value[:-1:2] + value[2::2]) / 2
        size = deviation.abs()
        changed = mass[1::2] @ size
        near = None
        if steps >= _JUMPS_FROM and not bool((changed <= allowed).all()):
            near = _outstanding(size, mass[1::2, None], allowed)
        if near is not None:
            left, at, height = _find_jumps(beta, gamma, act, power, nodes, value, near)
            # A step function of this height: its integral, less what the nodes above it gave.
            above = scale * _cdf(-at) - _sum_from(weight)[start + left + 1]
            total = total + (height * above).sum(dim=0)
            half = torch.where(left % 2 == 0, -height, height) / 2
            changed = mass[1::2] @ deviation.scatter_add(0, left // 2, half).abs()
        change = change + changed
    return total / scale, change / scale


def _probe(beta: Tensor, gamma: Tensor, act: Activation, power: int, steps: int) -> Tensor:
    """Compute how far from a straight line the activation is inside of all of some steps: (C,).

    Stairs look straight where each step has a tread; a kink is inside of one step at most.
    """
    width = 2 * _REACH / steps
    start = (torch.tensor(_PROBED).to(beta) / width).round() * width
    z = torch.cat([start, start + _GOLDEN * width, start + width])
    first, inside, last = _evaluate(beta + gamma * z[:, None], act, power).chunk(3)
    return (inside - torch.lerp(first, last, _GOLDEN)).abs().amin(dim=0)


def _evaluate(points: Tensor, act: Activation, power: int) -> Tensor:
    """Compute `act(points)^power`; `points` are ours, so activations may work in place."""
    # A module with weights of its own (PReLU) computes in their dtype.
    parameters = act.parameters() if isinstance(act, nn.Module) else iter(())
    seen = next((p.dtype for p in parameters), points.dtype)
    dtype, shape = points.dtype, points.shape
    try:
        value = act(points.to(seen))
    except Exception as error:
        raise ValueError(
            f"`act` fails on a tensor of shape {tuple(shape)} with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.shape != shape:
        raise ValueError(f"`act` must be elementwise: {act!r} did not keep shape {tuple(shape)}.")
    return value.to(dtype) ** power


def _outstanding(size: Tensor, mass: Tensor, allowed: Tensor) -> Tensor | None:
    """Return the pairs of steps that may hold a jump: (most of a channel, C), or None.

    A smooth activation deviates as much in the neighbouring pairs. Channels with fewer such pairs
    are filled up with pairs that hold no jump.
    """
    found = size[1:-1] > _OUTSTANDING * torch.maximum(size[:-2], size[2:])
    found &= mass[1:-1] * size[1:-1] > 0.01 * allowed
    most = int(found.sum(dim=0).max()) if found.numel() else 0
    return found.byte().topk(most, dim=0).indices + 1 if most else None


@torch.no_grad()
def _find_jumps(
    beta: Tensor,
    gamma: Tensor,
    act: Activation,
    power: int,
    nodes: Tensor,
    value: Tensor,
    near: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bisect pairs of steps for the largest jump in each, following the half that changes most.

    Returns:
        The node left of each jump, its place, and its height (0: not a jump), shaped as `near`.
    """
    first, middle, last = (value.gather(0, 2 * near + node) for node in range(3))
    earlier, later = (middle - first).abs(), (last - middle).abs()
    left = 2 * near + (later > earlier).long()
    low, high = nodes[left], nodes[left + 1]
    below, above = value.gather(0, left), value.gather(0, left + 1)
    least = _STILL_A_JUMP * (earlier + later)
    for _ in range(_BISECTIONS):
        if not bool(((above - below).abs() > least).any()):
            break
        at = (low + high) / 2
        here = _evaluate(beta + gamma * at, act, power)
        is_later = (above - here).abs() > (here - below).abs()
        low, below = torch.where(is_later, at, low), torch.where(is_later, here, below)
        high, above = torch.where(is_later, high, at), torch.where(is_later, above, here)
    height = above - below
    return left, low, torch.where(height.abs() > least, height, 0.0)


def _sum_from(weight: Tensor) -> Tensor:
    """Return, for each node, the weights of this node and of those after it but the last."""
    return F.pad(weight[:-1].flip(0).cumsum(0).flip(0), (0, 1))
