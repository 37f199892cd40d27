"""`selectconv compress` and `export` on a run's folder."""

import json

import pytest
import torch
from safetensors.torch import load_file

import selectconv as sc
from fake_runs import seal, write_run
from said import complaint
from selectconv.__main__ import main

NARROW = {"growth_rate": 4, "units": (2, 2), "in_channels": 1}
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("deploy") / "run", weights=True, method="dealloc")
    (path / "best.safetensors").write_bytes((path / "last.safetensors").read_bytes())
    return seal(path)


@pytest.fixture(scope="module")
def model(run):
    model = sc.create_model("densenet40", selective=True, realloc="none", **NARROW).eval()
    model.load_state_dict(load_file(run / "last.safetensors"))
    return model


def read_rows(capsys):
    return {row["model"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_compress_writes_the_runs_network(run, model, capsys, tmp_path):
    out = tmp_path / "small.safetensors"
    assert main(["compress", str(run), "--out", str(out), "--table", "--repeats=1", "--json"]) == 0
    rows = read_rows(capsys)
    assert list(rows) == ["plain", "masked", "compressed", "onnx"]
    assert all(row["ms"] > 0 and row["file_bytes"] > 0 for row in rows.values())
    assert rows["plain"]["time_ratio"] == 1.0
    small = sc.load_compressed(out)
    torch.testing.assert_close(small(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
    assert rows["compressed"]["params"] == sum(p.numel() for p in small.parameters())
    assert rows["compressed"]["macs"] == sc.count(model, IMAGES[:1]).macs < rows["plain"]["macs"]


def test_images_are_of_the_size_of_the_training(capsys, tmp_path):
    run = write_run(tmp_path / "run", weights=True, method="dealloc", image_size=4)
    assert main(["compress", str(run), "--json"]) == 0
    plain = sc.create_model("densenet40", **NARROW)
    assert read_rows(capsys)["plain"]["macs"] == sc.count(plain, torch.zeros(1, 1, 4, 4)).macs


def test_a_run_that_closed_filters(capsys, tmp_path):
    out = tmp_path / "run"
    words = (
        "train --model densenet40 --data digits --method dealloc --granularity filter --epochs 2"
    )
    options = ["--model-options", "{growth_rate: 4, units: [1, 1]}", "--subset", "100"]
    options += ["--target-macs", "0.6", "--test-subset", "50", "--out", str(out)]
    assert main([*words.split(), *options]) == 0
    small, page = tmp_path / "small.safetensors", tmp_path / "report.html"
    assert main(["compress", str(out), "--out", str(small)]) == 0
    assert not any("index" in str(node.target) for node in sc.load_compressed(small).graph.nodes)
    assert main(["report", str(out), "--out", str(page)]) == 0
    assert "filter" in page.read_text()


def test_compress_prints_a_table_and_has_a_default_place(run, capsys):
    assert main(["compress", str(run), "--best"]) == 0
    out = capsys.readouterr().out
    assert "compressed" in out
    assert "Larger than the plain network" not in out
    assert (run / "compressed.safetensors").exists()


def test_compress_says_why_a_re_allocated_network_is_larger(capsys, tmp_path):
    options = {"growth_rate": 4, "units": [2, 2], "realloc": "pointwise-only"}
    run = write_run(tmp_path / "run", weights=True, method="select", model_options=options)
    assert main(["compress", str(run)]) == 0
    assert (
        "No smaller than the plain network, because shifts are small convs"
        in capsys.readouterr().out
    )


def test_export_writes_an_onnx_file(run, model, capsys, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    words = ["export", str(run), "--out", str(tmp_path / "model.onnx")]
    for dynamic, images in ([], IMAGES), (["--dynamic", "size"], IMAGES.repeat(1, 1, 1, 2)):
        assert main([*words, *dynamic]) == 0
        said = capsys.readouterr().out
        assert "agrees with PyTorch" in said
        assert ("two sizes" in said) == bool(dynamic)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(images), rtol=1e-3, atol=1e-3)
    assert main([*words, "--dynamic", "sise"]) == 2
    assert "`dynamic` must be one of size; got 'sise'" in complaint(capsys)


@pytest.mark.parametrize("verb", ["compress", "export"])
def test_wrong_input_is_one_line_and_code_2(verb, run, capsys, tmp_path):
    assert main([verb, str(run), "--out", str(tmp_path)]) == 2
    assert f"`out` must be a file, got '{tmp_path}'" in complaint(capsys)
    assert main([verb, str(write_run(tmp_path / "new"))]) == 2  # without weights
    assert "has not finished an epoch yet" in complaint(capsys)
