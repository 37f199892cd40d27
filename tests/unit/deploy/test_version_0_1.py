"""Compressed files that version 0.1 wrote load as plain graphs with the same outputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import selectconv as sc
from selectconv.deploy.version_0_1 import upgrade

FILES = Path(__file__).parents[2] / "support" / "files"


def node(name):
    return {"node": name}


@pytest.mark.parametrize("name", ["densenet", "resnet"])
def test_files_of_version_0_1(name, tmp_path):
    outputs = load_file(FILES / "compressed_0.1_outputs.safetensors")
    small = sc.load_compressed(FILES / f"compressed_0.1_{name}.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(small(outputs["x"]), outputs[name], rtol=1e-5, atol=1e-5)
    kinds = {type(module) for module in small.modules()}
    assert nn.Conv2d in kinds
    assert not any(kind.__module__.startswith("selectconv") for kind in kinds)
    targets = {node.target for node in small.graph.nodes}
    assert not targets & {"new_empty", "copy_", "size", torch.narrow, torch.relu_}
    assert (torch.cat in targets) == (name == "densenet")
    sc.save_compressed(small, tmp_path / "again")  # as a plain file
    assert torch.equal(sc.load_compressed(tmp_path / "again")(outputs["x"]), small(outputs["x"]))


def test_a_plain_description_comes_back_as_it_is():
    description = {
        "modules": {"conv": ["Conv2d", {"dict": {"in_channels": 3}}]},
        "parameters": ["conv.weight"],
        "steps": [
            ["placeholder", "x", "x", [], {"dict": {}}],
            ["call_module", "conv", "conv", [node("x")], {"dict": {}}],
            ["call_function", "narrow", "torch.narrow", [node("conv"), 1, 0, 2], {"dict": {}}],
            ["output", "output", "output", [node("narrow")], {"dict": {}}],
        ],
    }
    assert upgrade(description) == description


def test_a_buffer_is_read_as_what_was_written_so_far():
    empty = {"dict": {}}
    steps = [
        ["placeholder", "x", "x", [], empty],
        ["call_method", "size", "size", [node("x"), 0], empty],
        ["call_method", "buffer", "new_empty", [node("x"), {"tuple": [node("size"), 9]}], empty],
        ["call_function", "a", "torch.narrow", [node("buffer"), 1, 0, 3], empty],
        ["call_method", "write_a", "copy_", [node("a"), node("x")], empty],
        ["call_function", "b", "torch.narrow", [node("buffer"), 1, 3, 3], empty],
        ["call_method", "write_b", "copy_", [node("b"), node("x")], empty],
        ["call_function", "first", "torch.abs", [node("buffer")], empty],
        ["call_function", "c", "torch.narrow", [node("buffer"), 1, 6, 3], empty],
        ["call_method", "write_c", "copy_", [node("c"), node("first")], empty],
        ["output", "output", "output", [[node("buffer"), node("buffer")]], empty],
    ]
    plain = upgrade({"modules": {}, "steps": steps})["steps"]
    assert [step[2] for step in plain] == ["x", "torch.cat", "torch.abs", "torch.cat", "output"]
    cat, second = plain[1], plain[3]
    assert cat[3] == [[node("x"), node("x")], 1]
    assert plain[2][3] == [node(cat[1])]
    assert second[3] == [[node(cat[1]), node("first")], 1]
    assert plain[4][3] == [[node(second[1]), node(second[1])]]
