"""Every check accepts what it should, and refuses the rest with the value in the message."""

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import selectconv as sc
from selectconv import checks
from selectconv.core.tensors import check_tensor
from tiny_models import conv_net, images

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


# Wrong calls of the public functions: one line that names the argument, whatever came.


X = images()[0][:1]
SMALL = sc.compress(nn.Sequential(nn.Conv2d(3, 2, 1)), X)
SOURCE = sc.ConstantMean(0.0, 4)


def allocator(**options):
    return sc.ChannelAllocator(conv_net(), total_epochs=2, **options)


NO_EXAMPLES = [None, 3, "x", (), (1, 3, 16, 16), np.zeros((1, 3, 8, 8)), {}, {1: X}, [None], X[:0]]
TAKES_EXAMPLE = {
    "count": lambda example: sc.count(conv_net(), example),
    "CostCounter": lambda example: sc.CostCounter(conv_net(), example),
    "compress": lambda example: sc.compress(conv_net(), example),
    "export_onnx": lambda example: sc.export_onnx(SMALL, "never.onnx", example),
    "convert": lambda example: sc.convert(conv_net(convert=False), example),
    "allocator": lambda example: allocator(example_input=example),
    "budget": lambda example: allocator(target_macs=0.5, example_input=example),
}


@pytest.mark.parametrize(
    ("name", "example"),
    [
        (name, example)
        for name in TAKES_EXAMPLE
        for example in NO_EXAMPLES
        if example is not None or name not in ("convert", "allocator")  # it is optional there
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_no_example(name, example):
    with pytest.raises((TypeError, ValueError), match="`example_input`") as caught:
        TAKES_EXAMPLE[name](example)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["count", "CostCounter", "compress", "budget"])
def test_an_example_that_forward_does_not_take(name):
    with pytest.raises(TypeError, match="`example_input` does not fit the model's forward: "):
        TAKES_EXAMPLE[name]((X, X))


@pytest.mark.parametrize("save", [sc.save_compressed, lambda m, path: sc.export_onnx(m, path, X)])
def test_what_is_no_regular_file_is_not_replaced(save, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(sc.SelectConvError, match="cannot be written: it is not a regular file"):
        save(SMALL, tmp_path / "pipe")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_state_that_reads_channels_that_are_not_there_is_refused():
    model = conv_net()
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, sc.SelectConv2d))
    state = model.state_dict()
    state[f"{name}.index"] = state[f"{name}.index"] + layer.in_channels
    with pytest.raises(sc.AllocationError, match=rf"`{name}\.index` names the channels"):
        model.load_state_dict(state)


@pytest.mark.parametrize("path", [None, 3, ["a"], b"a", "", "a\0b"])
@pytest.mark.parametrize(
    "call",
    [
        sc.load_compressed,
        lambda path: sc.save_compressed(SMALL, path),
        lambda path: sc.export_onnx(SMALL, path, X),
    ],
    ids=["load", "save", "export"],
)
def test_no_path(call, path):
    with pytest.raises((TypeError, ValueError), match="`path` must be a path, got"):
        call(path)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: sc.compress(conv_net(), X * float("nan")),
            sc.CompressionError,
            "NaN in `example_input`",
        ),
        (
            lambda: sc.load_compressed("a" * 5000),
            sc.CompressionError,
            "is not a compressed model: No such file",
        ),
        (
            lambda: sc.load_compressed("."),
            sc.CompressionError,
            "not a compressed model: .*a folder",
        ),
        (lambda: sc.save_compressed(SMALL, "."), sc.CompressionError, "cannot be written"),
        (lambda: sc.convert(conv_net(convert=False), where="3"), TypeError, "`where` must be a fu"),
        (lambda: sc.convert(conv_net(convert=False), realloc=[]), ValueError, "`realloc` must be"),
        (lambda: allocator(seed=1 << 70), ValueError, r"`seed` must be below 2\^63, got"),
        (
            lambda: sc.create_model("densenet40", units=3),
            TypeError,
            r"`units` must be a list, such as \[6, 6, 6\]; got 3",
        ),
        (lambda: sc.SelectConv2d(4, 4, 1).close([99]), ValueError, r"`slots` names \[99\]"),
        (
            lambda: allocator(followers=[3]),
            TypeError,
            r"`followers`.*got \[3\]",
        ),
        (lambda: allocator(mode={}), ValueError, "`mode` must be one of"),
        (lambda: allocator().apply({}), TypeError, "`plan` must be an AllocationPlan, got dict"),
        (lambda: sc.observe_damage(3, [X]), TypeError, "`model` must be an nn.Module, got int"),
        (lambda: sc.ConstantMean("x", 3), TypeError, "`value` must be a number, got 'x'"),
        (lambda: sc.ConcatMean([3]), TypeError, "`parts` must be a list of closed-form mean sou"),
        (lambda: sc.ConcatMean(SOURCE), TypeError, "`parts` must be a list of closed-form mean so"),
        (lambda: sc.SelectedMean(3, [0]), TypeError, "`part` must be a closed-form mean source"),
        (lambda: sc.SelectedMean(SOURCE, 3), ValueError, "`index` must be a list .*got 3"),
        (lambda: sc.SelectedMean(SOURCE, [0.5]), ValueError, "`index` must be .*0.5"),
        (lambda: sc.create_model([]), ValueError, "`name` must be one of"),
        (lambda: sc.create_model("densenet40", stem=3), ValueError, "`stem` must be one of"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "builtin"),
    [
        (lambda: sc.ChannelAllocator(conv_net(), total_epochs=3, shifts="hole"), ValueError),
        (lambda: sc.ChannelAllocator(conv_net(), total_epochs=3, gamma="high"), TypeError),
        (lambda: sc.create_model("foo"), ValueError),
        (lambda: sc.functional.shift2d([1], 2), TypeError),
        (lambda: sc.compress(3, torch.zeros(1)), TypeError),
        (lambda: sc.export_onnx(conv_net(), "a.onnx", torch.zeros(1), dynamic="foo"), ValueError),
    ],
)
def test_what_is_refused_is_an_error_of_the_package_and_a_builtin(call, builtin):
    with pytest.raises(builtin) as raised:
        call()
    assert isinstance(raised.value, sc.SelectConvError)
