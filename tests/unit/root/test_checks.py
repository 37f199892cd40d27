"""Every check accepts what it should, and refuses the rest with the value in the message."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from selectconv import checks
from selectconv.core.tensors import check_tensor

NUMBERS = [np.float32(0.5), np.int64(1), np.array(0.5), torch.tensor(0.5), torch.tensor(1)]
NAN, INF = float("nan"), float("inf")
AT_LEAST_2 = partial(checks.check_count, minimum=2)
MODE = partial(checks.check_choice, choices=("select", "zero"))


@pytest.mark.parametrize(
    ("check", "values", "kind"),
    [
        (checks.check_fraction, [0, 1, 0.0, 0.25, np.float64(0.5), *NUMBERS], float),
        (checks.check_gamma, [0, 1, *NUMBERS], float),
        (checks.check_gamma, ["auto"], str),
        (checks.check_non_negative, [0, 0.0, 3, 1e30, *NUMBERS], float),
        (checks.check_seed, [0, (1 << 63) - 1, np.int64(3)], int),
        (checks.check_flag, [True, False], bool),
        (AT_LEAST_2, [2, 10**9, np.int64(3), np.uint8(3), torch.tensor(3)], int),
        (MODE, ["select"], str),
    ],
)
def test_values_are_accepted_and_returned_plain(check, values, kind):
    for value in values:
        result = check("argument", value)
        assert result == value
        assert type(result) is kind


FRACTION = "a number in [0, 1]"
FINITE = "a finite number of at least 0"


@pytest.mark.parametrize(
    ("check", "values", "error", "accepted"),
    [
        (checks.check_fraction, [-1e-9, 1.0001, 2, NAN, INF, -INF], ValueError, FRACTION),
        (checks.check_fraction, ["0.5", None, [0.5], 1j, np.zeros(1)], TypeError, FRACTION),
        (checks.check_fraction, [True, torch.zeros(1)], TypeError, FRACTION),
        (checks.check_gamma, [-1e-9, 2], ValueError, f"{FRACTION} or 'auto'"),
        (checks.check_gamma, [None, "outo", True, [0.1]], TypeError, f"{FRACTION} or 'auto'"),
        (checks.check_non_negative, [-1e-9, -1, NAN, INF, -INF], ValueError, FINITE),
        (checks.check_non_negative, [False, "1", None], TypeError, FINITE),
        (checks.check_seed, [1 << 63], ValueError, "below 2^63"),
        (checks.check_flag, [1, "yes", None, torch.zeros(0)], TypeError, "True or False"),
        (checks.check_callable, ["3", None], TypeError, "a function"),
        (checks.check_path, ["", "a\0b"], ValueError, "a path"),
        (AT_LEAST_2, [1, 0, -5], ValueError, "at least 2"),
        (AT_LEAST_2, [True, 3.0, "3", None], TypeError, "an integer of at least 2"),
    ],
)
def test_values_are_refused_and_named(check, values, error, accepted):
    for value in values:
        message = f"`argument` must be {accepted}, got {value!r}."
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            check("argument", value)


def test_truth_is_no_number():
    for value in (np.True_, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"number in .* got True"):
            checks.check_fraction("gamma", value)
        with pytest.raises(TypeError, match="integer of at least 0, got True"):
            checks.check_count("top_k", value, 0)


def test_choice():
    with pytest.raises(ValueError, match=r"got 'selct'\. Did you mean 'select'\?"):
        MODE("mode", "selct")
    for value in ("qqq", None, 3, [], {}):
        message = f"`mode` must be one of select, zero; got {value!r}."
        with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
            MODE("mode", value)


def test_path():
    assert checks.check_path("path", "a/b") == checks.check_path("path", Path("a/b")) == Path("a/b")
    for value in (None, 3, b"a", ["a"]):
        with pytest.raises(TypeError, match=f"`path` must be a path, got {type(value).__name__}"):
            checks.check_path("path", value)


@pytest.mark.parametrize(
    ("value", "shape", "kind"),
    [
        (torch.zeros(2, 3), (2, 3), None),
        (torch.zeros(2, 3).bfloat16(), (None, 3), None),
        (torch.zeros(()), (), None),
        (torch.zeros(0, 5), (None, None), None),
        (torch.zeros(4, dtype=torch.bool), (4,), torch.bool),
    ],
)
def test_tensor_accepts(value, shape, kind):
    assert check_tensor("x", value, shape, kind) is None


@pytest.mark.parametrize(
    ("value", "shape", "kind", "error", "message"),
    [
        ([0.0], (1,), None, TypeError, "`x` must be a tensor, got list"),
        (np.zeros(1), (1,), None, TypeError, "`x` must be a tensor, got ndarray"),
        (torch.zeros(2, 3), (3, None), None, ValueError, r"shape \(3, \*\), got \(2, 3\)"),
        (torch.zeros(2), (2, 1), None, ValueError, r"shape \(2, 1\), got \(2,\)"),
        (torch.zeros(1), (), None, ValueError, r"shape \(\), got \(1,\)"),
        (torch.zeros(2).long(), (2,), None, TypeError, "floating dtype, got torch.int64"),
        (torch.zeros(2).bool(), (2,), None, TypeError, "floating dtype, got torch.bool"),
        (torch.zeros(2).cfloat(), (2,), None, TypeError, "floating dtype, got torch.complex64"),
        (torch.zeros(2), (2,), torch.int64, TypeError, "torch.int64, got torch.float32"),
        (torch.zeros(2).int(), (2,), torch.int64, TypeError, "torch.int64, got torch.int32"),
    ],
)
def test_tensor_refuses(value, shape, kind, error, message):
    with pytest.raises(error, match=message):
        check_tensor("x", value, shape, kind)
