"""What holds for every shift: drawn shapes, dtypes, memory formats and offsets."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles_allocation import naive_select
from oracles_formulas import naive_shift, padded_slice
from selectconv.core.shift import select_channels, shift2d

# Sums of a few products of numbers of order 1 to 10.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

dtypes = st.sampled_from(list(TOLERANCE))
fractional = st.floats(-6, 6, width=32)
far = st.sampled_from([-1e30, -1e6, 1e6, 1e30, float("inf"), -float("inf"), -0.0])
offsets = st.one_of(fractional, st.integers(-6, 6).map(float), far)


def layouts(x):
    """The same values in another order in memory."""
    return st.sampled_from(
        [x, x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT]
    )


@st.composite
def maps(draw, channels=None):
    """(N, C, H, W), small and rarely square."""
    shape = [draw(st.integers(1, high)) for high in (2, 3, 4, 5)]
    shape[1] = channels or shape[1]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(draw(dtypes))
    return draw(layouts(x))


@st.composite
def maps_and_offsets(draw):
    x = draw(maps())
    pairs = st.tuples(offsets, offsets)
    b = draw(st.lists(pairs, min_size=x.shape[1], max_size=x.shape[1]))
    return x, torch.tensor(b, dtype=x.dtype)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@given(maps_and_offsets())
def test_is_the_papers_formula_and_keeps_its_input(case):
    x, b = case
    before = x.clone()
    assert_close(shift2d(x, b), naive_shift(x, b), x.dtype)
    assert torch.equal(x, before)


@given(maps())
def test_shift_by_zero_is_the_identity(x):
    assert torch.equal(shift2d(x, torch.zeros(x.shape[1], 2)), x)


@given(maps(), st.integers(-7, 7), st.integers(-7, 7))
def test_shift_by_whole_pixels_is_padded_slicing(x, rows, columns):
    b = torch.tensor([[rows, columns]] * x.shape[1], dtype=torch.float32)
    np.testing.assert_array_equal(shift2d(x, b).numpy(), padded_slice(x.numpy(), rows, columns))


@given(maps_and_offsets(), st.floats(-4, 4, width=32), st.integers(0, 99))
def test_is_linear_in_its_input(case, factor, seed):
    x, b = case
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
    together = shift2d(factor * x + y, b)
    assert_close(together, (factor * shift2d(x, b) + shift2d(y, b)).double().numpy(), x.dtype)


@given(maps_and_offsets(), st.data())
def test_two_shifts_compose_like_the_formula(case, data):
    x, first = case
    second = first[torch.tensor(data.draw(st.permutations(range(len(first)))))].flip(1) / 2
    composed = naive_shift(naive_shift(x, first), second)
    assert_close(shift2d(shift2d(x, first), second), composed, x.dtype)


@given(maps(channels=3), st.sampled_from([1, 3, 5]), st.data())
def test_select_channels_is_the_formula(x, slots, data):
    def drawn(element, dtype):
        return torch.tensor(data.draw(st.tuples(*[element] * slots)), dtype=dtype)

    index = drawn(st.integers(0, 2), torch.int64)
    gate, shifted = drawn(st.booleans(), torch.bool), drawn(st.booleans(), torch.bool)
    shift = drawn(st.tuples(offsets, offsets), x.dtype)
    before = x.clone()
    expected = naive_select(x.double(), gate, index, shift, shifted)
    assert_close(select_channels(x, gate, index, shift, shifted), expected, x.dtype)
    assert torch.equal(x, before)
