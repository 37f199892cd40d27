"""`selectconv compress` and `export` on a run's folder."""

import functools
import json

import pytest
import torch

import selectconv as sc
from said import complaint
from selectconv.__main__ import main
from selectconv.deploy.onnx import open_session
from selectconv.lab.train import network
from selectconv.lab.train.checkpoint import load_weights
from selectconv.lab.train.config import resolve
from selectconv.lab.train.run_folder import RunFolder
from selectconv.lab.zoo import create_model

SMALL = ["--data", "digits", "--subset", "64", "--test-subset", "40", "--batch-size", "32"]
SMALL += ["--epochs", "2", "--gamma", "0.3", "--device", "cpu", "--method", "dealloc"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    narrow = functools.partial(create_model, growth_rate=4, units=(1, 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "create_model", narrow)
        run = tmp_path_factory.mktemp("deploy") / "run"
        assert main(["train", *SMALL, "--out", str(run)]) == 0
        from selectconv.lab.data.registry import dataset_info

        model = network.build_model(resolve(RunFolder(run).read_config()), dataset_info("digits"))
        load_weights(run / "last.safetensors", model)
        yield run, model.eval()


def test_compress_writes_the_runs_network(finished, capsys, tmp_path):
    run, model = finished
    out = tmp_path / "small.safetensors"
    assert (
        main(["compress", str(run), "--out", str(out), "--table", "--repeats", "1", "--json"]) == 0
    )
    rows = {row["model"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == ["plain", "masked", "compressed", "onnx"]
    assert all(row["ms"] > 0 and row["file_bytes"] > 0 for row in rows.values())
    assert rows["plain"]["time_ratio"] == 1.0
    small = sc.load_compressed(out)
    x = torch.randn(3, *_shape())
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    assert rows["compressed"]["params"] == sum(p.numel() for p in small.parameters())
    assert rows["compressed"]["macs"] == sc.count(model, x[:1]).macs


def _shape():
    from selectconv.lab.data.registry import dataset_info

    return dataset_info("digits").shape


def test_images_are_of_the_size_of_the_training(finished, capsys, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *SMALL, "--image-size", "4", "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["compress", str(run), "--json"]) == 0
    rows = {row["model"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    plain = create_model("densenet40", growth_rate=4, units=(1, 1, 1), in_channels=1)
    assert rows["plain"]["macs"] == sc.count(plain, torch.zeros(1, 1, 4, 4)).macs


def test_compress_prints_a_table_and_has_a_default_place(finished, capsys):
    run, _ = finished
    assert main(["compress", str(run), "--best"]) == 0
    out = capsys.readouterr().out
    assert "compressed" in out
    assert "Larger than the plain network" not in out
    assert (run / "compressed.safetensors").exists()


def test_compress_says_why_a_re_allocated_network_is_larger(finished, capsys, tmp_path):
    run = tmp_path / "run"
    options = "{growth_rate: 4, units: [1, 1, 1], realloc: pointwise-only}"
    select = ["--method", "select", "--gamma", "0.2", "--epochs", "4", "--model-options", options]
    assert main(["train", *SMALL, *select, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["compress", str(run)]) == 0
    assert "Larger than the plain network, because shifts are stored" in capsys.readouterr().out


def test_export_writes_an_onnx_file(finished, capsys, tmp_path):
    run, model = finished
    assert main(["export", str(run), "--out", str(tmp_path / "model.onnx")]) == 0
    assert "agrees with PyTorch" in capsys.readouterr().out
    x = torch.randn(3, *_shape())
    with torch.no_grad():
        got = open_session(tmp_path / "model.onnx")(x)[0]
        torch.testing.assert_close(got, model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("verb", ["compress", "export"])
def test_wrong_input_is_one_line_and_code_2(verb, finished, capsys, tmp_path):
    run, _ = finished
    assert main([verb, str(run), "--out", str(run / "config.yaml" / "file")]) == 2
    assert "config.yaml is a file" in complaint(capsys)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text((run / "config.yaml").read_text())
    assert main([verb, str(tmp_path / "new")]) == 2
    assert "has not finished an epoch yet" in capsys.readouterr().err
