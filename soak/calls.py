"""Wrong calls of the Python API and of the command line: a clear error of ours, nothing changed."""

import os
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import selectconv as sc
from selectconv.lab.train.config import setting_names
from soak.commands import Child, check_words, digest
from soak.driver import DIFFERENT, FOREIGN, Ended, Wrong

TITLE = "wrong calls of the Python API and of the command line"
WANTED = (
    "a `SelectConvError`, or a `TypeError` or `ValueError` that names the argument; no traceback"
)
COUNT, LIMIT_S = 300, 3600
ACCEPTED_S = 10  # a command that computes for longer took its arguments for right


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Make one wrong call."""
    warnings.simplefilter("ignore")
    return (call_python if number % 2 else call_command)(draw, scratch)


def values(scratch: Path) -> dict[str, Any]:
    """Return things that hardly any argument accepts, by what they are called."""
    return {
        "None": None, "a text": "3", "an empty text": "", "a negative number": -1, "0": 0,
        "a half": 0.5, "NaN": float("nan"), "infinity": float("inf"), "a large number": 10**12,
        "True": True, "bytes": b"3", "an empty list": [], "a list": [1, 2],
        "a tuple": (1, 3, 16, 16),
        "a dict": {"a": 1}, "a set": {1}, "an object": object(), "a function": lambda: None,
        "a class": nn.Conv2d, "a numpy array": np.zeros((1, 3, 8, 8)),
        "a numpy scalar": np.float64(3),
        "a scalar tensor": torch.tensor(1.0), "a tensor of integers": torch.arange(3),
        "an empty tensor": torch.zeros(0, 3, 8, 8), "a tensor of other rank": torch.zeros(2, 3),
        "a tensor of NaN": torch.full((1, 3, 8, 8), torch.nan), "a complex number": 1j,
        "a conv": nn.Conv2d(3, 8, 1), "an empty module": nn.Sequential(),
        "a linear": nn.Linear(2, 2),
        "a folder": scratch, "a missing file": scratch / "no" / "file", "a range": range(-1, 99),
        "a generator": (i for i in range(2)),
        "an optimizer": torch.optim.SGD([torch.zeros(1)], 0.1),
    }  # fmt: skip


def network() -> nn.Sequential:
    """Build a small converted network."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    sc.convert(model, torch.zeros(1, 3, 8, 8))
    return model


def right_calls(scratch: Path) -> list[tuple[str, Callable[..., Any], dict[str, Any], nn.Module]]:
    """Return calls with right arguments: a name, what is called, with what, and on which model."""
    model, x = network(), torch.randn(2, 3, 8, 8)
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    allocator = sc.ChannelAllocator(model, total_epochs=4)
    layer: Any = model[3]
    square, mean = torch.rand(4, 5), torch.rand(8)
    weight, index = torch.randn(6, 8, 3, 3), torch.arange(8)
    maps, b, truth = torch.randn(2, 8, 5, 5), torch.randn(8, 2), torch.ones(8, dtype=torch.bool)
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, weight_decay=1e-4)
    batches = [(x, torch.zeros(2, dtype=torch.long))]
    f = sc.functional
    small = sc.compress(model, x)
    sc.save_compressed(small, scratch / "whole.safetensors")
    calls: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        ("describe", sc.describe, {"model": model}),
        ("param_groups", sc.param_groups,
         {"model": model, "weight_decay": 0.1, "shift_weight_decay": 0.1}),
        ("ChannelAllocator", sc.ChannelAllocator, {
            "model": model, "optimizer": optimizer, "total_epochs": 4, "gamma": 0.1, "top_k": 3,
            "max_copies": 3, "stop_at": 0.5, "grace": 0, "mode": "select", "damage": "auto",
            "seed": 0, "target_macs": None, "target_params": None, "example_input": x,
            "followers": (),
        }),
        ("ChannelAllocator with a target", sc.ChannelAllocator, {
            "model": model, "total_epochs": 4, "target_macs": 0.9, "example_input": x,
        }),
        ("allocator.step", allocator.step, {"epoch": 0}),
        ("allocator.replay", allocator.replay, {"log": []}),
        ("allocator.apply", allocator.apply, {"plan": sc.AllocationPlan()}),
        ("allocator.load_state_dict", allocator.load_state_dict, {"state": allocator.state_dict()}),
        ("compress", sc.compress, {"model": model, "example_input": x, "round_to": 2}),
        ("count", sc.count, {"model": model, "example_input": x}),
        ("save_compressed", sc.save_compressed, {"module": small, "path": scratch / "a"}),
        ("load_compressed", sc.load_compressed, {"path": scratch / "whole.safetensors"}),
        ("export_onnx", sc.export_onnx,
         {"model": model, "path": scratch / "a.onnx", "example_input": x}),
        ("observe_damage", sc.observe_damage, {"model": model, "batches": batches}),
        ("create_model", sc.create_model, {
            "name": "densenet40", "num_classes": 10, "in_channels": 3, "stem": None,
            "selective": True, "realloc": "all", "growth_rate": 4,
        }),
        ("from_conv", sc.SelectConv2d.from_conv,
         {"conv": nn.Conv2d(8, 8, 1), "reallocate": True, "mean": None}),
        ("layer.ecdm", layer.ecdm, {"normalized": False, "damage": "mean"}),
        ("layer.dealloc", layer.dealloc, {"gamma": 0.1, "damage": "auto"}),
        ("layer.close", layer.close, {"slots": [1]}),
        ("layer.realloc", layer.realloc, {
            "top_k": 3, "max_copies": 3, "init": "zero", "use_shift": True, "max_shift": 1.5,
            "norm": "l2", "generator": None,
        }),
        ("BatchNormMean", sc.BatchNormMean, {"bn": model[1], "act": torch.relu}),
        ("shift2d", f.shift2d, {"x": maps, "b": b}),
        ("select_channels", f.select_channels,
         {"x": maps, "gate": truth, "index": index, "shift": b, "shifted": truth}),
        ("expected_relu", f.expected_relu, {"beta": mean, "gamma": mean}),
        ("expected_activation", f.expected_activation,
         {"beta": mean, "gamma": mean, "act": torch.relu}),
        ("ecdm", f.ecdm, {"weight": weight, "mean": mean, "groups": 1}),
        ("rms_damage", f.rms_damage, {"weight": weight, "mean": mean, "var": mean, "groups": 1}),
        ("normalize_ecdm", f.normalize_ecdm, {"ecdm": square}),
        ("choose_dealloc", f.choose_dealloc, {"necdm": square, "gamma": 0.1}),
        ("realloc_scores", f.realloc_scores, {
            "necdm": square, "index": torch.arange(4), "gate": torch.ones(4, dtype=torch.bool),
            "max_copies": 3, "norm": "l2",
        }),
    ]  # fmt: skip
    convert = ("convert", sc.convert, {
        "model": plain, "example_input": x, "where": None, "min_channels": 8, "realloc": "all",
    })  # fmt: skip
    return [(*convert, plain), *((*call, model) for call in calls)]


def call_python(draw: random.Random, scratch: Path) -> Ended:
    """Call a function with one argument wrong."""
    name, function, arguments, model = draw.choice(right_calls(scratch))
    argument = draw.choice(list(arguments))
    word, value = draw.choice(list(values(scratch).items()))
    what, before = f"{name}({argument}={word})", digest(model.state_dict())
    try:
        function(**{**arguments, argument: value})
    except sc.SelectConvError as error:
        said = f"{type(error).__name__}: {error}"
    except (TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        if not re.search(rf"\b{argument}\b", said):
            raise Wrong(what, FOREIGN, said[:300]) from error
    except Exception as error:
        raise Wrong(what, FOREIGN, f"{type(error).__name__}: {error}"[:300]) from error
    else:
        return Ended(what, "accepted")
    if digest(model.state_dict()) != before:
        raise Wrong(what, DIFFERENT, f"the model has changed: {said[:300]}")
    return Ended(what, "refused", said[:300])


WORDS = (
    "", "x", "-1", "0", "1e9", "nan", "inf", "-inf", "1.5", "true", "none", "null", "~", "[]",
    "[1, 2]", "{a: 1}", "{", "é", "x" * 300, "/dev/null/place", ".",
    "1e400", "0x10", "!!python/object/apply:os.system ['true']", "a\nb", "999999999999999999999",
    "*", "timm:nothing",
    "os:system", "no.such:function", "imagefolder:/dev/null/place", "%s", "--", "-", "'",
)  # fmt: skip


def call_command(draw: random.Random, scratch: Path) -> Ended:
    """Type a command with one or two words wrong."""
    file, empty = scratch / "file", scratch / "empty"
    file.write_bytes(draw.randbytes(100))
    empty.mkdir()
    word = draw.choice((*WORDS, str(file), str(empty)))
    other = draw.choice((*WORDS, str(file), str(empty)))
    flag = draw.choice([name.replace("_", "-") for name in setting_names()])
    out = str(scratch / "out")
    words = draw.choice((
        ["train", "--data", "digits", f"--{flag}={word}", "--dry-run", "--out", out],
        ["train", "--data", "digits", f"--{flag}", word, "--dry-run", "--out", out],
        ["train", "--config", word, "--dry-run"],
        ["train", "--data", "digits", "--out", word, "--dry-run"],
        ["train", "--resume", "--out", word],
        ["eval", word], ["eval", word, "--data-root", other],
        ["compress", word], ["compress", str(empty), "--out", word],
        ["compress", str(empty), "--round-to", word], ["export", word, "--out", other],
        ["report", word, "--out", out], ["report", str(empty), "--out", word],
        ["reproduce", word], ["reproduce", "table1", "--scale", word, "--dry-run"],
        ["reproduce", "table1", "--jobs", word, "--dry-run"],
        ["reproduce", "table1", "--out", word, "--dry-run"],
        ["data", word], ["data", "fetch", word, "--root", out],
        ["data", "fetch", "digits", "--root", word], ["models", word], [word], [word, other],
        ["bench", word], ["bench", "step", "--model", word], ["bench", "infer", "--runtime", word],
    ))  # fmt: skip
    what = "selectconv " + " ".join(_shown(one, scratch) for one in words)
    child = Child(words, before=lambda: os.chdir(scratch))
    try:
        ended = child.wait(ACCEPTED_S)
    except Wrong:
        return Ended(what, "accepted", "still at work")
    if ended.code == 0:
        return Ended(what, "accepted")
    return Ended(what, "refused", check_words(what, ended).replace(str(scratch), "SCRATCH"))


def _shown(word: str, scratch: Path) -> str:
    return repr(word.replace(str(scratch), "SCRATCH")[:60]) if not word.isidentifier() else word
