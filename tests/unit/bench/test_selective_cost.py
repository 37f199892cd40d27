"""`selectconv bench step|infer`: that what is measured is what the rows say."""

import json

import pytest
import torch

import selectconv as sc
from selectconv.__main__ import main
from selectconv.lab.bench import selective_cost


def pointwise(model):
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, sc.SelectConv2d) and layer.kernel_size == (1, 1)
    ]


def test_a_fifth_of_the_slots_is_moved_to_few_sources():
    layers = pointwise(selective_cost.build_network("densenet40", "moved"))
    assert len(layers) == 18
    for layer in layers:
        moved = layer.moved & layer.shifted
        assert bool(layer.gate.all())
        assert int(moved.sum()) == round(0.2 * layer.in_channels)
        assert 1 <= len(layer.index[moved].unique()) <= 8
        assert float(layer.shift.detach()[moved].abs().max()) > 0.1
        assert float(layer.weight.detach()[:, moved].abs().min()) > 0


def test_half_of_the_slots_are_closed():
    layers = pointwise(selective_cost.build_network("densenet40", "closed"))
    assert [int((~layer.gate).sum()) for layer in layers] == [
        (layer.in_channels + 1) // 2 for layer in layers
    ]


def test_all_kinds_start_from_the_same_weights():
    plain, fresh = (selective_cost.build_network("densenet40", kind) for kind in ("plain", "fresh"))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(x), fresh(x))


def bench(capsys, *words):
    assert main(["bench", *words, "--repeats", "1", "--json"]) == 0
    return {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


SMALL = ("--model", "selectconv.lab.reproduce.networks:small_mobilenet", "--image-size", "16")
TINY = ("--model", "tiny_models:plain_net", "--image-size", "16")


@pytest.mark.parametrize("layout", ["NCHW", "channels last"])
def test_bench_step_prints_ratios_and_the_path(layout, capsys):
    rows = bench(capsys, "step", *SMALL, "--batch-size", "2")
    for share in ("20% of the slots re-allocated", "50% of the slots closed"):
        row = rows[f"{SMALL[1]}, training step, {layout}: {share} / plain"]
        assert row["unit"] == "x"
        assert row["value"] > 0
        assert row["n"] == row["threads"] == 1
        assert "kernel" in row["path"] or "torch's operations" in row["path"]


def test_bench_step_of_densenet40_has_the_trainer_too(monkeypatch, capsys):
    small = selective_cost.Subject(image_size=8, batch_size=2)
    monkeypatch.setattr("selectconv.lab.bench.measure._BATCH", 2)
    monkeypatch.setattr("selectconv.lab.bench.measure.Subject", lambda: small)
    monkeypatch.setattr("selectconv.lab.bench.measure.measure_memory", lambda subject: [])
    rows = bench(capsys, "step")
    assert rows["trainer: speed over the plain loop"]["value"] > 0
    assert rows["64 inputs, 1x1, 20% moved: layer / conv"]["value"] > 0
    assert "densenet40, training step, NCHW: selective, fresh / plain" in rows


def test_bench_infer_of_another_network(capsys):
    rows = bench(capsys, "infer", *SMALL, "--batch-size", "2")
    assert all(case.startswith(f"{SMALL[1]}, eager, batch 2, ") for case in rows)
    about = f"{SMALL[1]}, eager, batch 2, NCHW"
    assert "macs_ratio" not in rows[f"{about}: 50% of the slots closed / plain"]
    small = rows[f"{about}: compressed, 50% of the slots closed / plain"]
    assert 0.2 < small["macs_ratio"] < 0.9
    moved = pointwise(selective_cost.build_network(SMALL[1], "moved", 16))
    assert len(moved) == 11  # the 1x1 convs
    assert all(bool(layer.moved.any()) for layer in moved)


def test_bench_infer_in_onnxruntime_has_no_masked_networks(capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    rows = bench(capsys, "infer", *TINY, "--batch-size", "2", "--runtime", "onnxruntime")
    about = f"{TINY[1]}, onnxruntime, batch 2, NCHW"
    assert list(rows) == [
        f"{about}: plain",
        f"{about}: compressed, 20% of the slots re-allocated / plain",
        f"{about}: compressed, 50% of the slots closed / plain",
    ]


def test_bench_infer_compiles_both_sides(monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    bench(capsys, "infer", *TINY, "--batch-size", "1", "--runtime", "compile")
    assert len(compiled) == 6


@pytest.mark.parametrize("flags", [["--runtime", "compile"], ["--compile"]])
def test_bench_step_compiles_both_sides(flags, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    rows = bench(capsys, "step", *TINY, "--batch-size", "2", *flags)
    assert len(compiled) == 4
    assert f"{TINY[1]}, compiled training step, NCHW: selective, fresh / plain" in rows


def test_bench_alloc_of_another_network_also_where_means_are_observed(capsys):
    for model in (TINY[1], "selectconv.lab.reproduce.networks:small_mobilenet"):
        rows = bench(capsys, "alloc", "--model", model, "--image-size", "16", "--runtime", "eager")
        first, later = rows
        assert first.startswith(f"{model}, ")
        assert not first.startswith(f"{model}, 0 slots closed")
        assert rows[later]["unit"] == "s"


def test_bench_prints_a_table_for_people(capsys):
    words = ["infer", *SMALL, "--batch-size", "1", "--repeats", "2"]
    assert main(["bench", *words]) == 0
    table = capsys.readouterr().out
    assert "smallest to largest" in table
    assert "compressed, 50% of the slots closed / plain" in table
    assert "CPU time on one thread" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "--model", "densenet40"], "--model is only for `bench step`, `bench alloc`, "),
        (["alloc", "--batch-size", "2"], "--batch-size is only for"),
        (["step", "--compile", "--runtime", "eager"], "cannot be combined"),
        (["step", "--runtime", "onnxruntime"], "--runtime eager or compile; got 'onnx"),
        (["alloc", "--runtime", "compile"], "`bench alloc` accepts only --runtime eager"),
        (["infer", "--runtime", "onnx"], "one of eager, compile, onnxruntime"),
        (["step", "--model", "densenet4"], "Did you mean 'densenet40'"),
        (["step", "--model", "densenet40", "--image-size", "0"], "at least 1, got 0"),
    ],
)
def test_bench_refuses_in_one_line(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_memory_is_measured_where_linux_tells_it():
    rows = selective_cost.measure_memory(selective_cost.Subject(batch_size=8))
    if not rows:
        pytest.skip("no /proc/self/status")
    plain, ratio = rows
    assert plain["value"] > 5  # MiB: the activations of 8 images
    assert 0.5 < ratio["value"] < 2
