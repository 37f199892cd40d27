"""`selectconv bench step|infer`: that what is measured is what the rows say."""

import json

import pytest
import torch

import selectconv as sc
from selectconv.__main__ import main
from selectconv.bench import selective_cost


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


@pytest.mark.parametrize("case", ["infer", "step"])
def test_bench_prints_ratios_and_the_path(case, monkeypatch, capsys):
    monkeypatch.setattr(selective_cost, "_BATCH", 2)
    if case == "step":
        monkeypatch.setattr("selectconv.bench.measure._BATCH", 2)
        monkeypatch.setattr("selectconv.bench.measure.measure_memory", list)
    assert main(["bench", case, "--repeats", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    what = {"infer": "evaluation", "step": "training step"}[case]
    for layout in ("NCHW", "channels last"):
        for share in ("20% of the slots re-allocated", "50% of the slots closed"):
            (row,) = [
                row
                for row in rows
                if row["case"] == f"densenet40, {what}, {layout}: {share} / plain"
            ]
            assert row["unit"] == "x"
            assert row["value"] > 0
            assert "kernel" in row["path"] or "torch's operations" in row["path"]


def test_bench_of_another_network(monkeypatch, capsys):
    monkeypatch.setattr(selective_cost, "_BATCH", 2)
    model = "selectconv.reproduce.networks:small_mobilenet"
    words = ["--model", model, "--image-size", "16", "--repeats", "1", "--json"]
    assert main(["bench", "infer", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["case"].startswith(f"{model}, evaluation, ") for row in rows)
    moved = pointwise(selective_cost.build_network(model, "moved", 16))
    assert len(moved) == 11  # the 1x1 convs
    assert all(bool(layer.moved.any()) for layer in moved)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["alloc", "--model", "densenet40"], "--model goes with"),
        (["step", "--model", "densenet40", "--compile"], "takes no --model"),
        (["step", "--model", "densenet4"], "Did you mean 'densenet40'"),
        (["step", "--model", "densenet40", "--image-size", "0"], "at least 1, got 0"),
    ],
)
def test_bench_refuses_in_one_line(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_memory_is_measured_where_linux_tells_it():
    rows = selective_cost.measure_memory()
    if not rows:
        pytest.skip("no /proc/self/status")
    plain, ratio = rows
    assert plain["value"] > 10  # MiB: the activations of 64 images
    assert 0.5 < ratio["value"] < 2
