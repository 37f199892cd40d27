"""shift2d and select_channels against the paper's formula in plain loops."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from oracles_allocation import naive_select
from oracles_formulas import naive_shift
from selectconv.core.shift import select_channels, shift2d, shift_channels

# Four products of numbers near 1, in whatever order they are added.
EXACT = 1e-13  # float64
CLOSE = 2e-6  # float32
# Power of two: the formula is linear between whole pixels, so its difference quotient is exact.
STEP = 2.0**-10

OFFSETS = [0.0, -0.0, 1, -1, 2, -3, 0.5, -0.5, 0.3, -1.7, 6.25, 1e6, -1e6, 1e30, -1e30]
OFFSETS += [float("inf"), -float("inf"), 1e-9, -1e-9]


def all_offsets(dtype=torch.float64):
    """A channel for each offset, with another one beside it: (C, 2)."""
    rows = torch.tensor(OFFSETS, dtype=dtype)
    return torch.stack([rows, rows.roll(7)], dim=1)


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(
        actual.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance
    )


def assert_untouched(function, x):
    """Neither the call nor what is done to its result changes `x`."""
    before = x.clone()
    function(x).add_(1.0)
    assert torch.equal(x, before)


class TestShift2d:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_the_rounded_float32_result(self, dtype):
        b = all_offsets(torch.float32)
        x = torch.randn(2, len(b), 3, 4).to(dtype)
        for offset in (b, b.to(dtype)):
            out = shift2d(x, offset)
            assert out.dtype == dtype
            assert torch.equal(out, shift2d(x.float(), offset.float()).to(dtype))

    @pytest.mark.parametrize(
        ("of_map", "of_offset", "tolerance"),
        [
            (torch.float64, torch.float64, EXACT),
            (torch.float64, torch.float32, EXACT),  # they do not cost the map its digits
            (torch.float32, torch.float16, CLOSE),  # they are taken as they are
            (torch.float32, torch.bfloat16, CLOSE),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("size", [(3, 4), (1, 1)], ids=str)
    def test_is_the_papers_formula_whatever_the_offsets_dtype(
        self, size, of_map, of_offset, tolerance
    ):
        b = all_offsets(torch.float32).to(of_offset)
        x = torch.randn(1, len(b), *size, dtype=of_map)
        out = shift2d(x, b)
        assert out.dtype == of_map
        assert_close(out, naive_shift(x, b.to(of_map)), tolerance)

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
    def test_keeps_the_memory_format_and_the_input(self, layout):
        x, b = torch.randn(2, 3, 4, 5).to(memory_format=layout), torch.tensor([[0.5, -1.0]] * 3)
        out = shift2d(x, b)
        assert out.stride() == x.stride()
        assert_close(out, naive_shift(x, b), CLOSE)
        assert_untouched(lambda x: shift2d(x, b), x)
        assert_untouched(lambda x: shift2d(x, torch.zeros(3, 2)), x)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("whole", [0, 1, -1, -3, 3, -4, 4])  # 3 and 4: the map's H and W
    @pytest.mark.parametrize("other", [0.0, 0.3])
    def test_derivative_at_whole_pixels_is_the_right_hand_one(self, axis, whole, other):
        x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
        b = torch.full((1, 2), other, dtype=torch.float64)
        b[0, axis] = whole
        seed = torch.randn_like(x)

        b.requires_grad_()
        (slope,) = torch.autograd.grad((shift2d(x, b) * seed).sum(), b)

        right = b.detach().clone()
        right[0, axis] += STEP
        rise = (naive_shift(x, right) - naive_shift(x, b.detach())) * seed.numpy()
        assert slope[0, axis].item() == pytest.approx(rise.sum() / STEP, rel=1e-9, abs=1e-9)

    def test_gradients(self):
        x = torch.randn(2, 3, 3, 2, dtype=torch.float64, requires_grad=True)
        b = torch.tensor([[0.3, -1.6], [2.4, -0.25], [-7.5, 0.5]], dtype=torch.float64)
        b.requires_grad_()
        assert gradcheck(shift2d, (x, b))
        assert gradgradcheck(shift2d, (x, b))

    @pytest.mark.parametrize("b", [1e30, float("inf"), -float("inf")])
    def test_far_out_the_gradients_are_zero(self, b):
        x = torch.randn(1, 1, 2, 3, requires_grad=True)
        b = torch.tensor([[b, 0.5]], requires_grad=True)
        shift2d(x, b).sum().backward()
        assert not x.grad.any()
        assert not b.grad.any()

    @pytest.mark.parametrize(
        ("x", "b", "error", "message"),
        [
            ([1.0], torch.zeros(1, 2), TypeError, "`x` must be a tensor, got list"),
            (torch.zeros(1, 1, 4), torch.zeros(1, 2), ValueError, r"`x`.*got \(1, 1, 4\)"),
            (torch.zeros(1, 1, 2, 2).int(), torch.zeros(1, 2), TypeError, "`x`.*got torch.int32"),
            (
                torch.zeros(1, 3, 2, 2),
                torch.zeros(2, 2),
                ValueError,
                r"`b`.*\(3, 2\) to match `x`, got \(2, 2\)",
            ),
            (torch.zeros(1, 3, 2, 2), torch.zeros(3), ValueError, r"`b`.*got \(3,\)"),
            (torch.zeros(1, 1, 2, 2), torch.zeros(1, 2).long(), TypeError, "`b`.*got torch.int64"),
        ],
    )
    def test_refuses(self, x, b, error, message):
        with pytest.raises(error, match=message):
            shift2d(x, b)


class TestShiftChannels:
    @pytest.mark.parametrize("size", [(4,), (1,), (2, 3, 4)], ids=str)
    def test_equals_the_formula_in_any_number_of_axes(self, size):
        b = torch.tensor(OFFSETS[:11], dtype=torch.float64)
        b = torch.stack([b.roll(4 * axis) for axis in range(len(size))], dim=1)
        x = torch.randn(1, len(b), *size, dtype=torch.float64)
        assert_close(shift_channels(x, b), naive_shift(x, b), EXACT)

    def test_keeps_channels_last_3d(self):
        x = torch.randn(2, 2, 2, 3, 4).to(memory_format=torch.channels_last_3d)
        assert shift_channels(x, torch.full((2, 3), 0.5)).stride() == x.stride()


def allocation(axes, dtype=torch.float64):
    """Five slots over three channels.

    A plain one, two copies of channel 0 with different shifts, a closed one with a shift, and a
    moved but unshifted one, whose offset must not matter.
    """
    gate = torch.tensor([True, True, True, False, True])
    index = torch.tensor([0, 0, 0, 2, 1])
    shift = torch.tensor([[0.0], [0.7], [-1.0], [0.4], [9.0]], dtype=dtype).repeat(1, axes)
    shift = shift * torch.tensor([1.0, -0.5, 2.0], dtype=dtype)[:axes]
    shifted = torch.tensor([False, True, True, True, False])
    return gate, index, shift, shifted


class TestSelectChannels:
    @pytest.mark.parametrize("size", [(4,), (3, 4), (2, 3, 2)], ids=str)
    def test_without_shift_is_copying(self, size):
        x = torch.randn(2, 3, *size)
        gate, index, *_ = allocation(len(size))
        out = select_channels(x, gate, index, None, None)
        np.testing.assert_array_equal(out.double().numpy(), naive_select(x.double(), gate, index))

    def test_slots_that_are_not_shifted_are_copied_bit_for_bit(self):
        x = torch.randn(1, 3, 3, 4).bfloat16()
        gate, index, shift, _ = allocation(2, torch.float32)
        out = select_channels(x, gate, index, shift, torch.zeros(5, dtype=torch.bool))
        assert torch.equal(out, select_channels(x, gate, index, None, None))

    def test_closed_slots_are_zero_whatever_they_would_read(self):
        x = torch.full((1, 3, 2, 2), float("nan"))
        gate, index, shift, shifted = allocation(2, torch.float32)
        out = select_channels(x, torch.zeros_like(gate), index, shift, shifted)
        assert not out.any()

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_keeps_dtype_memory_format_and_the_input(self, layout, dtype):
        x = torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=layout)
        gate, index, *moves = allocation(2, torch.float32)
        for arguments in [(gate, index, *moves), (gate, index, None, None)]:
            out = select_channels(x, *arguments)
            assert out.dtype == dtype
            assert out.is_contiguous(memory_format=layout)
            assert_untouched(lambda x: select_channels(x, *arguments), x)  # noqa: B023

    def test_meta_tensors_show_the_shape(self):
        x = torch.zeros(2, 3, 4, 5, device="meta")
        out = select_channels(x, *(part.to("meta") for part in allocation(2, torch.float32)))
        assert out.shape == (2, 5, 4, 5)

    def test_gradients_reach_x_and_shift(self):
        x = torch.randn(1, 3, 3, 2, dtype=torch.float64, requires_grad=True)
        gate, index, shift, shifted = allocation(2)
        shift = (shift + 0.05).requires_grad_()  # away from whole pixels
        assert gradcheck(
            lambda x, shift: select_channels(x, gate, index, shift, shifted), (x, shift)
        )

        select_channels(x, gate, index, shift, shifted).square().sum().backward()
        assert shift.grad.any(dim=1).tolist() == [False, True, True, False, False]
        assert x.grad.flatten(2).any(dim=2).tolist() == [[True, True, False]]

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("x", [1.0], TypeError, "`x` must be a tensor, got list"),
            ("x", torch.zeros(2, 3), ValueError, r"`x`.*spatial axes, got \(2, 3\)"),
            ("x", torch.zeros(1, 3, 1, 1, 1, 1), ValueError, r"`x`.*got \(1, 3, 1, 1, 1, 1\)"),
            ("x", torch.zeros(1, 3, 2, 2).long(), TypeError, "`x`.*got torch.int64"),
            ("gate", torch.ones(5), TypeError, "`gate`.*torch.bool, got torch.float32"),
            (
                "gate",
                torch.ones(4, dtype=torch.bool),
                ValueError,
                r"`gate`.*\(5\) to match `index`, got",
            ),
            ("index", torch.zeros(5).int(), TypeError, "`index`.*torch.int64, got torch.int32"),
            ("index", torch.zeros(5, 1).long(), ValueError, r"`index`.*got \(5, 1\)"),
            ("index", torch.tensor([0, 1, 2, 3, 0]), ValueError, "`index`.*0 to 2.*got 0 to 3"),
            ("index", torch.tensor([0, 1, -1, 2, 0]), ValueError, "`index`.*got -1 to 2"),
            ("shift", torch.zeros(5, 3), ValueError, r"`shift`.*\(5, 2\) to match `index` and"),
            ("shift", torch.zeros(5, 2).long(), TypeError, "`shift`.*got torch.int64"),
            ("shift", None, ValueError, "`shift` and `shifted` go together"),
            ("shifted", None, ValueError, "`shift` and `shifted` go together"),
            ("shifted", torch.ones(5), TypeError, "`shifted`.*torch.bool, got torch.float32"),
            ("shifted", torch.ones(3, dtype=torch.bool), ValueError, r"`shifted`.*got \(3,\)"),
        ],
    )
    def test_refuses(self, name, value, error, message):
        names = ("x", "gate", "index", "shift", "shifted")
        arguments = dict(zip(names, (torch.zeros(1, 3, 2, 2), *allocation(2)), strict=True))
        with pytest.raises(error, match=message):
            select_channels(**{**arguments, name: value})


@pytest.mark.parametrize(
    "shape", [(1, 2, 0, 3), (1, 2, 3, 0), (1, 2, 0, 0), (0, 2, 3, 3), (1, 0, 3, 3)]
)
def test_empty_maps(shape):
    x, b = torch.zeros(shape, dtype=torch.float16), torch.ones(shape[1], 2)
    assert shift2d(x, b).shape == shape
    assert shift2d(x, b).dtype == x.dtype
    everything = torch.ones(shape[1], dtype=torch.bool)
    index = torch.arange(shape[1])
    assert select_channels(x, everything, index, b, everything).shape == shape
