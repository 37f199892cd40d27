"""Wrong calls of the public functions: one line that names the argument, whatever came."""

import os

import numpy as np
import pytest
from torch import nn

import selectconv as sc
from tiny_models import conv_net, images

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


@pytest.mark.parametrize("example", NO_EXAMPLES, ids=lambda example: f"{example!r:.20}")
@pytest.mark.parametrize("name", TAKES_EXAMPLE)
def test_no_example(name, example):
    if name in ("convert", "allocator") and example is None:
        pytest.skip("it is optional")
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
