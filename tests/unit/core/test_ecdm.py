"""Section 2.1's formulas against high precision, loops and Monte Carlo."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oracles_formulas import (
    mp_relu,
    mp_square_relu,
    naive_ecdm,
    quad_expectation,
    relative_error,
)
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.moments import (
    expected_activation,
    expected_power,
    expected_relu,
    is_relu,
)

PROMISED = 1e-9  # API.md: float64 relative error for beta / |gamma| in [-35, 35]
NO_CANCELLATION = 1e-11  # Eq. (1) as it stands is off by 1e-10 at -35, ours by 1e-13
INTEGRATED = 1e-4  # API.md: absolute error, times 1 + |gamma|
EXACT = 1e-12  # float64 sums of a few products
CLOSE = 1e-6  # float32 ones
SUMS_TO_ONE = 1e-5  # float32: a few dozen roundings
# A normal variable is further out than this once in 1.7 million draws; the seed is fixed besides.
STANDARD_ERRORS = 5


expected_square_activation = partial(expected_power, power=2)
expected_square_relu = partial(expected_square_activation, act=F.relu)


RELUS = [(expected_relu, mp_relu), (expected_square_relu, mp_square_relu)]


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def assert_within_standard_errors(samples, expected):
    """The mean of `samples` (n, ...) agrees with `expected` (...)."""
    error = samples.std(axis=0) / math.sqrt(len(samples))
    np.testing.assert_array_less(abs(samples.mean(axis=0) - expected), STANDARD_ERRORS * error)


def worst_relative_error(function, oracle, beta, gamma):
    value = function(beta, torch.full_like(beta, gamma)).tolist()
    exact = [oracle(b, gamma) for b in beta.tolist()]
    return max(map(relative_error, value, exact))


@pytest.mark.parametrize(("function", "oracle"), RELUS)
class TestExpectedRelu:
    @pytest.mark.parametrize("gamma", [1.0, 0.37, -2.0, 1e-3, 250.0])
    def test_keeps_nine_digits_to_35_standard_deviations(self, function, oracle, gamma):
        beta = torch.arange(-35, 35.1, 0.5, dtype=torch.float64) * abs(gamma)
        assert worst_relative_error(function, oracle, beta, gamma) <= PROMISED

    def test_without_spread_it_is_relu(self, function, oracle):
        beta = f64(2.0, 0.0, -0.0, -3.0)
        value = function(beta, torch.zeros(4, dtype=torch.float64))
        assert value.tolist() == [float(oracle(b, 0.0)) for b in beta.tolist()]

    @pytest.mark.parametrize("gamma", [1e-300, 5e-324, 1e-160])
    @pytest.mark.parametrize("beta", [1.0, 0.0, -1.0, 1e-300, -1e-300])
    def test_next_to_no_spread(self, function, oracle, beta, gamma):
        value = function(f64(beta), f64(gamma)).item()
        # abs: below the smallest normal number float64 has no digits to keep.
        assert value == pytest.approx(float(oracle(beta, gamma)), rel=PROMISED, abs=1e-307)

    @pytest.mark.parametrize("gamma", [1.0, -1e-4, 1e8])
    @pytest.mark.parametrize("ratio", [-1e200, -1e4, -50.0, -40.0, -38.0, 38.0, 40.0, 50.0, 1e4])
    def test_far_out(self, function, oracle, ratio, gamma):
        beta = ratio * abs(gamma)
        value = function(f64(beta), f64(gamma)).item()
        # abs: phi(38) is already subnormal.
        assert value == pytest.approx(float(oracle(beta, gamma)), rel=PROMISED, abs=1e-290)

    @pytest.mark.parametrize(
        ("dtypes", "result"),
        [
            ((torch.float32, torch.float32), torch.float32),
            ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
            ((torch.float16, torch.float16), torch.float16),
            ((torch.bfloat16, torch.float32), torch.float32),
            ((torch.float32, torch.float64), torch.float64),
        ],
    )
    def test_keeps_the_wider_dtype_and_rounds_once(self, function, oracle, dtypes, result):
        beta = torch.tensor([[-2.0, 0.25], [1.5, -9.0]], dtype=dtypes[0])
        gamma = torch.tensor([[0.5, 1.25], [-2.0, 1.0]], dtype=dtypes[1])
        value = function(beta, gamma)
        assert value.dtype == result
        assert torch.equal(value, function(beta.double(), gamma.double()).to(result))

    @pytest.mark.parametrize(
        ("beta", "gamma", "error", "message"),
        [
            (0.5, torch.ones(1), TypeError, "`beta` must be a tensor, got float"),
            (torch.ones(2), 1.0, TypeError, "`gamma` must be a tensor, got float"),
            (torch.ones(2).long(), torch.ones(2), TypeError, "`beta`.*got torch.int64"),
            (
                torch.ones(2),
                torch.ones(3),
                ValueError,
                r"`beta` and `gamma` must have shapes that broadcast, got \(2,\) and \(3,\)",
            ),
        ],
    )
    def test_refuses(self, function, oracle, beta, gamma, error, message):
        with pytest.raises(error, match=message):
            function(beta, gamma)


def test_expected_relu_does_not_cancel_left_of_zero():
    beta = torch.arange(-35, -20, 0.25, dtype=torch.float64)
    assert worst_relative_error(expected_relu, mp_relu, beta, 1.0) <= NO_CANCELLATION


def test_expected_relu_gradients_are_finite_without_spread():
    beta, gamma = f64(1.0, -1.0, 0.3, -50.0), f64(0.0, 0.0, 1.0, 1.0)
    slopes = torch.autograd.functional.jacobian(lambda *a: expected_relu(*a).sum(), (beta, gamma))
    for slope in slopes:
        assert slope.isfinite().all()
    # dE/dbeta = Phi(beta / |gamma|)
    np.testing.assert_allclose(slopes[0], [1.0, 0.0, 0.6179114221889526, 0.0], atol=EXACT)


class Case(NamedTuple):
    """An activation, the same in plain Python, and where it bends (or turns in a narrow place)."""

    act: object
    python: object
    breaks: tuple = ()


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


CASES = {
    "relu": Case(F.relu, lambda x: max(x, 0.0), (0,)),
    "relu_": Case(F.relu_, lambda x: max(x, 0.0), (0,)),
    "ReLU": Case(nn.ReLU(inplace=True), lambda x: max(x, 0.0), (0,)),
    "clamp": Case(lambda x: x.clamp_(min=0.0), lambda x: max(x, 0.0), (0,)),
    "ReLU6": Case(nn.ReLU6(inplace=True), lambda x: min(max(x, 0.0), 6.0), (0, 6)),
    "relu6": Case(F.relu6, lambda x: min(max(x, 0.0), 6.0), (0, 6)),
    "hardswish": Case(
        nn.Hardswish(inplace=True), lambda x: x * min(max(x + 3, 0.0), 6.0) / 6, (-3, 3)
    ),
    "LeakyReLU": Case(nn.LeakyReLU(0.2), lambda x: x if x > 0 else 0.2 * x, (0,)),
    "silu": Case(F.silu, lambda x: x * sigmoid(x), (-40, -10, 0, 10, 40)),
    "gelu": Case(nn.GELU(), lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)), (-9, -3, 0, 3, 9)),
    "tanh": Case(torch.tanh, math.tanh, (-20, -5, 0, 5, 20)),
    "hardtanh": Case(nn.Hardtanh(), lambda x: min(max(x, -1.0), 1.0), (-1, 1)),
    "elu": Case(nn.ELU(), lambda x: x if x > 0 else math.expm1(x), (-40, -10, 0)),
    "None": Case(None, lambda x: x),
    "square": Case(lambda x: x**2, lambda x: x * x),
    # Steep: the fewest steps do not do.
    "ramp": Case(lambda x: (400 * x).clamp(0, 4), lambda x: min(max(400 * x, 0.0), 4.0), (0, 0.01)),
}
BETAS = [-7.0, -0.6, 0.0, 0.3, 3.1, 5.9]


def assert_integrates(case, beta, gamma, power):
    """The moment of the given power is within the promise for each beta at this gamma."""
    function = {1: expected_activation, 2: expected_square_activation}[power]
    value = function(beta, torch.full_like(beta, gamma), case.act)
    assert value.dtype == beta.dtype
    exact = [quad_expectation(case.python, case.breaks, b, gamma, power) for b in beta.tolist()]
    # The square of something of the size of gamma is promised relative to gamma's square. `square`
    # has no slope to bound: its moments, up to 1e11, keep 11 digits instead.
    rtol = 1e-11 if case.python is CASES["square"].python else 0.0
    atol = INTEGRATED * (1 + abs(gamma)) ** power
    np.testing.assert_allclose(value.tolist(), exact, rtol=rtol, atol=atol)


class TestExpectedActivation:
    @pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.1, 1.0, -1.0, 10.0, 300.0])
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("power", [1, 2])
    def test_equals_quadrature(self, name, gamma, power):
        assert_integrates(CASES[name], f64(*BETAS), gamma, power)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_per_channel_activations(self, dtype):
        prelu = nn.PReLU(3, dtype=dtype)
        slopes = [0.0, 0.25, -0.5]
        prelu.weight.detach().copy_(torch.tensor(slopes))
        beta, gamma = torch.tensor([0.3, -0.3, 0.1], dtype=dtype), torch.ones(3, dtype=dtype)
        value = expected_activation(beta, gamma, prelu)
        assert value.dtype == dtype
        for channel, slope in enumerate(slopes):
            exact = quad_expectation(
                lambda x, slope=slope: x if x > 0 else slope * x, (0,), beta[channel].item(), 1.0
            )
            assert value[channel].item() == pytest.approx(exact, abs=INTEGRATED * 2)

    def test_the_closed_form_serves_relu(self):
        beta, gamma = f64(-30.0, 0.1), f64(1.0, 0.7)
        for act in (nn.ReLU(), nn.ReLU(inplace=True), F.relu, F.relu_, torch.relu, torch.relu_):
            assert is_relu(act)
            assert torch.equal(expected_activation(beta, gamma, act), expected_relu(beta, gamma))
            square = expected_square_activation(beta, gamma, act)
            assert torch.equal(square, expected_square_relu(beta, gamma))
        for act in (None, nn.ReLU6(), F.relu6, nn.ReLU):
            assert not is_relu(act)

    def test_many_channels_in_several_chunks(self, monkeypatch):
        beta, gamma = torch.linspace(-3, 3, 50).double(), torch.linspace(0, 2, 50).double()
        whole = expected_activation(beta, gamma, nn.Hardswish())
        monkeypatch.setattr("selectconv.core.moments._CHUNK", 21 * 50)  # an odd number of rows
        np.testing.assert_allclose(
            expected_activation(beta, gamma, nn.Hardswish()), whole, atol=EXACT
        )

    def test_keeps_its_inputs_and_dtype(self):
        beta, gamma = torch.tensor([-1.0, 1.0]).bfloat16(), torch.tensor([0.5, 2.0]).bfloat16()
        value = expected_activation(beta, gamma, nn.ReLU6(inplace=True))
        assert value.dtype == torch.bfloat16
        assert beta.tolist() == [-1.0, 1.0]
        assert gamma.tolist() == [0.5, 2.0]

    @pytest.mark.parametrize("function", [expected_activation, expected_square_activation])
    @pytest.mark.parametrize("act", [nn.ReLU6(), nn.PReLU(), F.silu, F.relu, None])
    @pytest.mark.parametrize(
        ("beta", "gamma"), [((), ()), ((2, 3), (2, 3)), ((2, 3), ()), ((2, 1), (3,)), ((0, 3), ())]
    )
    def test_any_shape(self, function, act, beta, gamma):
        beta, gamma = torch.randn(beta), torch.randn(gamma)
        value = function(beta, gamma, act)
        means, spreads = torch.broadcast_tensors(beta, gamma)
        flat = function(means.flatten(), spreads.flatten(), act)
        assert torch.equal(value, flat.view(means.shape))

    def test_per_channel_activations_need_channels(self):
        for shape in ((), (2, 3)):
            with pytest.raises(ValueError, match=r"must be \(C,\) for an `act` with parameters"):
                expected_activation(torch.zeros(shape), torch.ones(shape), nn.PReLU(3))

    @pytest.mark.parametrize("function", [expected_activation, expected_square_activation])
    @pytest.mark.parametrize("act", [nn.GLU(dim=1), lambda x: x.sum(), lambda x: x.tolist()])
    def test_refuses_what_is_not_elementwise(self, function, act):
        with pytest.raises(ValueError, match=r"`act` must be elementwise: .* did not keep shape"):
            function(torch.zeros(4), torch.ones(4), act)

    def test_refuses_what_is_not_an_activation(self):
        with pytest.raises(TypeError, match=r"`act` .*got 3"):
            expected_activation(torch.zeros(4), torch.ones(4), 3)


class TestEcdm:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_narrow_weights_are_summed_in_float32(self, dtype):
        weight, mean = torch.randn(2, 3, 5, 5).to(dtype), torch.rand(3)
        damage = ecdm(weight, mean)
        assert damage.dtype == torch.float32
        np.testing.assert_allclose(damage, naive_ecdm(weight.float(), mean), atol=CLOSE * 25)

    @pytest.mark.parametrize("groups", [1, 2])
    def test_is_the_expected_damage_of_a_conv(self, groups):
        """The definition: E[Conv(X; W) - Conv(X; W_-i)] over the pixels, replicate padding."""
        beta, gamma = f64(-1.0, 0.5, 0.0, 2.0), f64(1.0, 0.3, -2.0, 0.5)
        weight = torch.randn(2, 4 // groups, 3, 3, dtype=torch.float64)
        x = torch.randn(2000, 4, 4, 5, dtype=torch.float64)
        x = F.relu(x * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1))
        expected = ecdm(weight, expected_relu(beta, gamma), groups=groups)
        padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
        whole = F.conv2d(padded, weight, groups=groups)
        for slot in range(4):
            # W_-i: no weight left on slot i.
            without = padded.clone()
            without[:, slot] = 0
            damage = (whole - F.conv2d(without, weight, groups=groups)).mean(dim=(2, 3))
            fed = [j for j in range(2) if j * groups // 2 == slot * groups // 4]
            assert_within_standard_errors(damage[:, fed].numpy(), expected[slot, fed].numpy())
            assert not expected[slot, [j for j in range(2) if j not in fed]].any()

    def test_rms_is_the_size_of_the_damage_at_a_pixel(self):
        beta, gamma = f64(-1.0, 0.5, 2.0), f64(1.0, 0.3, -0.5)
        weight = torch.randn(2, 3, 3, 3, dtype=torch.float64)
        mean = expected_relu(beta, gamma)
        var = expected_square_relu(beta, gamma) - mean**2
        patch = torch.randn(20_000, 3, 3, 3, dtype=torch.float64)
        patch = F.relu(patch * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1))
        added = torch.einsum("ncyx,ocyx->nco", patch, weight)
        assert_within_standard_errors(
            added.square().numpy(), rms_damage(weight, mean, var).square().numpy()
        )

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"weight": [1.0]}, TypeError, "`weight` must be a tensor, got list"),
            ({"weight": torch.ones(4)}, ValueError, r"`weight` must be \(O, .*got \(4,\)"),
            ({"weight": torch.ones(4, 3, 1).int()}, TypeError, "`weight`.*got torch.int32"),
            (
                {"mean": torch.ones(3)},
                ValueError,
                r"`mean`.*\(6\) to match `weight` and `groups`, got \(3,\)",
            ),
            ({"mean": torch.ones(6).long()}, TypeError, "`mean`.*got torch.int64"),
            ({"mean": 1.0}, TypeError, "`mean` must be a tensor, got float"),
            ({"groups": 3}, ValueError, "`groups`=3 must divide the 4 outputs"),
            ({"groups": 0}, ValueError, "`groups` must be at least 1, got 0"),
            ({"groups": 2.0}, TypeError, "`groups` must be an integer of at least 1, got 2.0"),
        ],
    )
    def test_refuses(self, change, error, message):
        arguments = {"weight": torch.ones(4, 3, 1), "mean": torch.ones(6), "groups": 2, **change}
        with pytest.raises(error, match=message):
            ecdm(**arguments)
        with pytest.raises(error, match=message):
            rms_damage(var=torch.ones(6), **arguments)

    def test_rms_refuses_a_wrong_variance(self):
        with pytest.raises(ValueError, match=r"`var`.*\(3\) to match `weight`.*, got \(2,\)"):
            rms_damage(torch.ones(1, 3, 1), torch.ones(3), torch.ones(2))


class TestNormalizeEcdm:
    @pytest.mark.parametrize("size", [1e38, 3.4e38, 1.0, 1e-30, 1e-38, 1e-44], ids=str)
    def test_columns_of_any_size_sum_to_one(self, size):
        damage = torch.full((40, 1), size)
        damage[0] *= -1
        normalized = normalize_ecdm(damage)
        assert normalized.sum().item() == pytest.approx(1.0, abs=SUMS_TO_ONE)
        np.testing.assert_allclose(normalized, 1 / 40, rtol=SUMS_TO_ONE)

    def test_keeps_dtype_and_input(self):
        damage = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        assert normalize_ecdm(damage).dtype == torch.float64
        assert damage.tolist() == [[1.0], [-1.0]]

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
    def test_nothing_to_normalise(self, shape):
        assert normalize_ecdm(torch.zeros(shape)).shape == shape

    @pytest.mark.parametrize(
        ("damage", "error", "message"),
        [
            (torch.ones(3), ValueError, r"`ecdm`.*\(\*, \*\), got \(3,\)"),
            (torch.ones(3, 2).long(), TypeError, "`ecdm`.*got torch.int64"),
            ([[1.0]], TypeError, "`ecdm` must be a tensor, got list"),
        ],
    )
    def test_refuses(self, damage, error, message):
        with pytest.raises(error, match=message):
            normalize_ecdm(damage)
