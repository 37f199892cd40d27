"""Every check accepts what it should, and refuses the rest with the value in the message."""

from pathlib import Path

import numpy as np
import pytest
import torch

from selectconv.checks import (
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_gamma,
    check_non_negative,
    check_path,
)
from selectconv.core.tensors import check_tensor

NUMBERS = [np.float32(0.5), np.int64(1), np.array(0.5), torch.tensor(0.5), torch.tensor(1)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [0, 1, 0.0, 0.25, np.float64(0.5), *NUMBERS])
def test_fraction_accepts(value):
    result = check_fraction("gamma", value)
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize("value", [-1e-9, 1.0001, 2, -1, NAN, INF, -INF])
def test_fraction_refuses_values(value):
    with pytest.raises(ValueError, match=rf"`gamma` must be in \[0, 1\], got {value!r}\."):
        check_fraction("gamma", value)


@pytest.mark.parametrize("value", [True, "0.5", None, [0.5], 1j, np.zeros(1), torch.zeros(1)])
def test_fraction_refuses_types(value):
    with pytest.raises(TypeError, match=r"`gamma` must be a number in \[0, 1\], got") as caught:
        check_fraction("gamma", value)
    assert repr(value) in str(caught.value)


def test_truth_is_no_number():
    for value in (np.True_, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"number in .* got True"):
            check_fraction("gamma", value)
        with pytest.raises(TypeError, match="integer of at least 0, got True"):
            check_count("top_k", value, 0)


def test_gamma():
    assert check_gamma("gamma", "auto") == "auto"
    assert type(check_gamma("gamma", np.float32(0.5))) is float
    for value in (None, "outo", True, [0.1]):
        with pytest.raises(TypeError, match=r"a number in \[0, 1\] or 'auto', got") as caught:
            check_gamma("gamma", value)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, 0.0, 3, 1e30, *NUMBERS])
def test_non_negative_accepts(value):
    result = check_non_negative("decay", value)
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize("value", [-1e-9, -1, NAN, INF, -INF])
def test_non_negative_refuses_values(value):
    with pytest.raises(
        ValueError, match=rf"`decay` must be finite and not negative, got {value!r}"
    ):
        check_non_negative("decay", value)


@pytest.mark.parametrize("value", [False, "1", None])
def test_non_negative_refuses_types(value):
    with pytest.raises(TypeError, match=f"`decay` must be a non-negative number, got {value!r}"):
        check_non_negative("decay", value)


@pytest.mark.parametrize("value", [2, 10**9, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_count_accepts(value):
    result = check_count("top_k", value, 2)
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize("value", [1, 0, -5])
def test_count_refuses_values(value):
    with pytest.raises(ValueError, match=f"`top_k` must be at least 2, got {value}"):
        check_count("top_k", value, 2)


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_count_refuses_types(value):
    with pytest.raises(TypeError, match=f"`top_k` must be an integer of at least 2, got {value!r}"):
        check_count("top_k", value, 2)


def test_flag():
    assert check_flag("is_open", True) is True
    for value in (1, "yes", None, torch.zeros(0), np.ones(2)):
        with pytest.raises(TypeError, match="`is_open` must be True or False, got"):
            check_flag("is_open", value)


def test_choice_accepts():
    assert check_choice("mode", "select", ("select", "zero")) == "select"


def test_choice_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'selct'\. Did you mean 'select'\?"):
        check_choice("mode", "selct", ("select", "zero"))


@pytest.mark.parametrize("value", ["qqq", None, 3])
def test_choice_lists_all_when_nothing_is_near(value):
    with pytest.raises(ValueError, match=rf"`mode` must be one of select, zero; got {value!r}\.$"):
        check_choice("mode", value, ("select", "zero"))


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


def test_choice_refuses_what_is_no_word():
    for value in (3, None, [], ["a"], {}):
        with pytest.raises(ValueError, match="`mode` must be one of a, b; got"):
            check_choice("mode", value, ("a", "b"))


def test_callable():
    check_callable("where", print)
    with pytest.raises(TypeError, match="`where` must be a function, got '3'"):
        check_callable("where", "3")


def test_path():
    assert check_path("path", "a/b") == check_path("path", Path("a/b")) == Path("a/b")
    for value in (None, 3, b"a", ["a"]):
        with pytest.raises(TypeError, match=f"`path` must be a path, got {type(value).__name__}"):
            check_path("path", value)
    with pytest.raises(ValueError, match="`path` must be a path, got an empty one"):
        check_path("path", "")
