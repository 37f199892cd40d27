"""What holds for every damage matrix: drawn shapes, groups, kernels and dtypes."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles_formulas import naive_ecdm, naive_rms_damage
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.moments import (
    expected_activation,
    expected_power,
    expected_relu,
)

# Sums of at most a few dozen products of numbers of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
TIGHT = 1e-9  # float64 after a handful of operations

dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 999)
kernels = st.lists(st.integers(1, 3), max_size=3)


@st.composite
def convs(draw, most_groups=4):
    """A conv's weight, the moments of its input, and its groups."""
    groups, dtype = draw(st.integers(1, most_groups)), draw(dtypes)
    outputs, width = groups * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(seeds))
    weight = torch.randn(outputs, width, *draw(kernels), generator=generator)
    mean = torch.randn(width * groups, generator=generator)
    var = torch.rand(width * groups, generator=generator)
    return weight.to(dtype), mean.to(dtype), var.to(dtype), groups


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


@given(convs())
def test_is_the_formula(conv):
    weight, mean, var, groups = conv
    assert_close(ecdm(weight, mean, groups), naive_ecdm(weight, mean, groups), weight.dtype)
    expected = naive_rms_damage(weight, mean, var, groups)
    assert_close(rms_damage(weight, mean, var, groups), expected, weight.dtype)


@given(convs(most_groups=1), st.data())
def test_permuting_channels_permutes_it(conv, data):
    weight, mean, var, _ = conv
    slots = torch.tensor(data.draw(st.permutations(range(weight.shape[1]))))
    outputs = torch.tensor(data.draw(st.permutations(range(weight.shape[0]))))
    moved = weight[outputs][:, slots]
    dtype = weight.dtype
    assert_close(ecdm(moved, mean[slots]), ecdm(weight, mean)[slots][:, outputs], dtype)
    expected = rms_damage(weight, mean, var)[slots][:, outputs]
    assert_close(rms_damage(moved, mean[slots], var[slots]), expected, dtype)


@given(convs(), st.floats(-8, 8, width=32), st.data())
def test_a_row_scales_with_the_mean_of_its_slot(conv, factor, data):
    weight, mean, _, groups = conv
    slot = data.draw(st.integers(0, len(mean) - 1))
    scaled = mean.clone()
    scaled[slot] *= factor
    expected = ecdm(weight, mean, groups)
    expected[slot] *= factor
    assert_close(ecdm(weight, scaled, groups), expected, weight.dtype)


@given(convs())
def test_rms_is_never_less_than_the_mean_damage(conv):
    weight, mean, var, groups = conv
    slack = TOLERANCE[weight.dtype]
    damage = ecdm(weight, mean, groups).abs()
    assert (rms_damage(weight, mean, var, groups) >= damage * (1 - slack) - slack).all()
    sure = rms_damage(weight, mean, torch.zeros_like(var), groups)
    assert_close(sure, damage, weight.dtype)


@given(convs(), st.data())
def test_columns_sum_to_one_or_to_zero_where_nothing_is_left(conv, data):
    weight, mean, _, groups = conv
    is_open = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(mean), max_size=len(mean)))
    )
    size = data.draw(st.sampled_from([1.0, 1e-30, 1e30]))
    damage = ecdm(weight, mean * is_open, groups) * size
    normalized = normalize_ecdm(damage)
    assert (normalized >= 0).all()
    assert not normalized[~is_open].any()
    assert_close(normalized.sum(dim=0), (damage != 0).any(dim=0).double(), weight.dtype)


@given(st.floats(-35, 35), st.floats(1e-3, 1e3), st.booleans())
def test_moments_of_relu_obey_their_laws(ratio, scale, negative):
    beta = torch.tensor([ratio * scale], dtype=torch.float64)
    gamma = torch.tensor([-scale if negative else scale], dtype=torch.float64)
    mean = expected_relu(beta, gamma)
    assert mean > 0
    assert mean >= beta * (1 - TIGHT)
    # relu(x) - relu(-x) = x, and E[relu(x)^2] + E[relu(-x)^2] = E[x^2]
    np.testing.assert_allclose(mean - expected_relu(-beta, gamma), beta, atol=TIGHT * scale)
    square = expected_power(beta, gamma, torch.relu, 2)
    both = square + expected_power(-beta, gamma, torch.relu, 2)
    np.testing.assert_allclose(both, beta**2 + gamma**2, rtol=TIGHT)
    assert square >= mean**2 * (1 - TIGHT)


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 1), st.floats(0.1, 6))
def test_piecewise_linear_activations_are_sums_of_relus(beta, gamma, slope, limit):
    """E is linear in the activation, so Eq. (1) gives every clipped leaky ReLU in closed form."""
    at, spread = (torch.tensor([value], dtype=torch.float64) for value in (beta, gamma))
    value = expected_activation(
        at, spread, lambda x: torch.where(x < 0, slope * x, x).clamp_max(limit)
    )
    up = expected_relu(at, spread) - slope * expected_relu(-at, spread)
    exact = up - expected_relu(at - limit, spread)
    # API.md's promise.
    np.testing.assert_allclose(value, exact, atol=1e-4 * (1 + gamma))
