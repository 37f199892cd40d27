"""Naive oracles for the paper's formulas: loops, high precision, sampling. Slow and obvious."""

import itertools
import math

import mpmath
import numpy as np


def add_up(values):
    """Add one after the other; from Python 3.12 on, `sum` is more exact than that."""
    total = 0.0
    for value in values:
        total += value
    return total


def naive_shift(x, b):
    """Section 2.2, word for word, for any number of spatial axes: x (N, C, ...), b (C, axes)."""
    x, b = np.asarray(x, dtype=np.float64), np.asarray(b, dtype=np.float64)
    out = np.zeros_like(x)
    pixels = list(itertools.product(*(range(size) for size in x.shape[2:])))
    for n, c in np.ndindex(x.shape[:2]):
        for here, there in itertools.product(pixels, pixels):
            kernel = 1.0
            for i, j, offset in zip(here, there, b[c], strict=True):
                kernel *= max(0.0, 1 - abs(i - j + offset))
            out[(n, c, *here)] += x[(n, c, *there)] * kernel
    return out


def padded_slice(x, rows, columns):
    """Shift (N, C, H, W) by whole pixels: pad with zeros, cut the window out."""
    height, width = x.shape[2:]
    padded = np.pad(x, [(0, 0), (0, 0), (abs(rows),) * 2, (abs(columns),) * 2])
    top, left = abs(rows) + rows, abs(columns) + columns
    return padded[:, :, top : top + height, left : left + width]


def naive_ecdm(weight, mean, groups=1):
    """Eq. (2), entry by entry, from a weight in torch's layout (O, I / groups, ...)."""
    out = np.zeros((weight.shape[1] * groups, weight.shape[0]))
    for slot, output, kernel in _connections(weight, groups):
        out[slot, output] = float(mean[slot]) * add_up(kernel)
    return out


def naive_rms_damage(weight, mean, var, groups=1):
    """The root mean square of sum_k W_k X_k for independent pixels X_k, entry by entry."""
    out = np.zeros((weight.shape[1] * groups, weight.shape[0]))
    for slot, output, kernel in _connections(weight, groups):
        spread = float(var[slot]) * add_up(value * value for value in kernel)
        out[slot, output] = math.sqrt(spread + (float(mean[slot]) * add_up(kernel)) ** 2)
    return out


def _connections(weight, groups):
    """Yield every (slot, output, kernel values) that a conv of this weight connects."""
    outputs, width = weight.shape[:2]
    for output in range(outputs):
        group = output // (outputs // groups)
        for j in range(width):
            kernel = [float(value) for value in np.ravel(np.asarray(weight)[output, j])]
            yield group * width + j, output, kernel


def mp_relu(beta, gamma):
    """Eq. (1) with 50 digits."""
    with mpmath.workdps(50):
        beta, gamma = mpmath.mpf(beta), abs(mpmath.mpf(gamma))
        if beta <= -1000 * gamma:  # less than 10^-200000, or without spread
            return mpmath.mpf(0)
        if gamma == 0:
            return beta
        return gamma * mpmath.npdf(beta / gamma) + beta * mpmath.ncdf(beta / gamma)


def mp_square_relu(beta, gamma):
    """`E[max(N(beta, gamma^2), 0)^2]` with 50 digits."""
    with mpmath.workdps(50):
        beta, gamma = mpmath.mpf(beta), abs(mpmath.mpf(gamma))
        if beta <= -1000 * gamma:
            return mpmath.mpf(0)
        if gamma == 0:
            return beta**2
        ratio = beta / gamma
        inside = (beta**2 + gamma**2) * mpmath.ncdf(ratio)
        return inside + beta * gamma * mpmath.npdf(ratio)


def relative_error(value, exact):
    """|value - exact| / |exact| with 50 digits; 0 if both are 0."""
    with mpmath.workdps(50):
        if exact == 0:
            return abs(float(value))
        return float(abs((mpmath.mpf(value) - exact) / exact))


def quad_expectation(act, breaks, beta, gamma, power=1):
    """`E[act(N(beta, gamma^2))^power]` by quadrature, split where `act` bends or jumps."""
    if gamma == 0:
        return float(act(beta)) ** power
    ends = [-12.0, 12.0]  # beyond 12 standard deviations there is 4e-33
    inside = [(at - beta) / gamma for at in breaks]
    points = sorted({*ends, *(z for z in inside if ends[0] < z < ends[1])})

    def integrand(z):
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return float(act(beta + gamma * z)) ** power * density

    return float(mpmath.fp.quad(integrand, points))
