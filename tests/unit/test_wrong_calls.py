"""Wrong calls of the public functions: one line that names the argument, whatever came."""

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


NO_EXAMPLES = [None, 3, "x", (), (1, 3, 16, 16), np.zeros((1, 3, 8, 8)), {}, {1: X}, [None]]
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


@pytest.mark.parametrize("path", [None, 3, ["a"], b"a", ""])
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
        (lambda: sc.convert(conv_net(convert=False), where="3"), TypeError, "`where` must be a fu"),
        (lambda: sc.convert(conv_net(convert=False), realloc=[]), ValueError, "`realloc` must be"),
        (lambda: allocator(followers=[3]), TypeError, "`followers` must be models, got int"),
        (lambda: allocator(mode={}), ValueError, "`mode` must be one of"),
        (lambda: allocator().apply({}), TypeError, "`plan` must be an AllocationPlan, got dict"),
        (
            lambda: sc.observe_damage(conv_net(), [X], forward=3),
            TypeError,
            "`forward` must be a function, got 3",
        ),
        (lambda: sc.observe_damage(3, [X]), TypeError, "`model` must be an nn.Module, got int"),
        (lambda: sc.ConstantMean("x", 3), TypeError, "`value` must be a number, got 'x'"),
        (lambda: sc.ConcatMean([3]), TypeError, "`parts` must be a list of closed-form mean sou"),
        (lambda: sc.ConcatMean(SOURCE), TypeError, "`parts` must be a list of closed-form mean so"),
        (lambda: sc.SelectedMean(3, [0]), TypeError, "`part` must be a closed-form mean source"),
        (lambda: sc.SelectedMean(SOURCE, 3), TypeError, "`index` must be a list of integers, got"),
        (lambda: sc.SelectedMean(SOURCE, [0.5]), TypeError, "`index` must be a list of integers"),
        (lambda: sc.create_model([]), ValueError, "`name` must be one of"),
        (lambda: sc.create_model("densenet40", stem=3), ValueError, "`stem` must be one of"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_folder_is_no_compressed_model(tmp_path):
    with pytest.raises(sc.CompressionError, match="is not a compressed model: it is a folder"):
        sc.load_compressed(tmp_path)
    with pytest.raises(sc.CompressionError, match="cannot be written"):
        sc.save_compressed(SMALL, tmp_path)
