"""`selectconv bench`: that what is measured is what the rows say."""

import json
from dataclasses import asdict

import pytest
import torch

import selectconv as sc
from selectconv.__main__ import main
from selectconv.lab.bench import cases
from selectconv.lab.bench.cases import Subject
from selectconv.lab.bench.timing import in_turn

SMALL = Subject("selectconv.lab.reproduce.networks:small_mobilenet", 16, 2)
TINY = Subject("tiny_models:plain_net", 16, 2)
MOVED, CLOSED = "20% of the slots re-allocated", "50% of the slots closed"


def pointwise(model):
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, sc.SelectConv2d) and layer.kernel_size == (1, 1)
    ]


def test_both_sides_are_measured_in_turn():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = in_turn(sides, repeats=2, seconds=0.0)
    assert calls == ["a", "a", "b", "b", *"abab"]  # warm-up and one call to see how long it takes
    assert {name: len(side) for name, side in times.items()} == {"a": 2, "b": 2}


def test_a_fifth_of_the_slots_is_moved_to_few_sources():
    layers = pointwise(Subject().build_network("moved"))
    assert len(layers) == 18
    for layer in layers:
        moved = layer.moved & layer.shifted
        assert bool(layer.gate.all())
        assert int(moved.sum()) == round(0.2 * layer.in_channels)
        assert 1 <= len(layer.index[moved].unique()) <= 8
        assert float(layer.shift.detach()[moved].abs().max()) > 0.1
        assert float(layer.weight.detach()[:, moved].abs().min()) > 0


def test_half_of_the_slots_are_closed_and_all_kinds_start_from_the_same_weights():
    for layer in pointwise(Subject().build_network("closed")):
        assert int((~layer.gate).sum()) == (layer.in_channels + 1) // 2
    plain, fresh = (Subject().build_network(kind) for kind in ("plain", "fresh"))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(x), fresh(x))


def bench(capsys, case, subject=None, *words):
    """Return the lines of `selectconv bench` by case."""
    flags = [
        word
        for name, value in ({} if subject is None else asdict(subject)).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert main(["bench", case, *flags, *words, "--repeats", "1", "--json"]) == 0
    return {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_bench_step_prints_ratios_and_the_path(capsys):
    rows = bench(capsys, "step", SMALL)
    for layout in ("NCHW", "channels last"):
        for share in (MOVED, CLOSED):
            row = rows[f"{SMALL.model}, training step, {layout}: {share} / plain"]
            assert row["unit"] == "x"
            assert row["value"] > 0
            assert row["n"] == row["threads"] == 1
            assert "kernel" in row["path"] or "torch's operations" in row["path"]
    assert not any("trainer" in case for case in rows)


def test_bench_step_of_densenet40_has_the_trainer_too(monkeypatch, capsys):
    monkeypatch.setattr(Subject, "__eq__", lambda *both: True)
    rows = bench(capsys, "step", Subject(batch_size=2))
    assert rows["trainer: speed over the plain loop"]["value"] > 0
    assert "densenet40, training step, NCHW: selective, fresh / plain" in rows


def test_bench_infer_of_another_network(capsys):
    rows = bench(capsys, "infer", SMALL)
    assert all(case.startswith(f"{SMALL.model}, eager, batch 2, ") for case in rows)
    about = f"{SMALL.model}, eager, batch 2, NCHW"
    assert "macs_ratio" not in rows[f"{about}: {CLOSED} / plain"]
    assert 0.2 < rows[f"{about}: compressed, {CLOSED} / plain"]["macs_ratio"] < 0.9
    moved = pointwise(SMALL.build_network("moved"))
    assert len(moved) == 11  # the 1x1 convs
    assert all(bool(layer.moved.any()) for layer in moved)


def test_bench_infer_in_onnxruntime_has_no_masked_networks(capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    rows = bench(capsys, "infer", TINY, "--runtime", "onnxruntime")
    about = f"{TINY.model}, onnxruntime, batch 2, NCHW"
    assert list(rows) == [
        f"{about}: plain",
        f"{about}: compressed, {MOVED} / plain",
        f"{about}: compressed, {MOVED} by whole pixels / plain",
        f"{about}: compressed, {CLOSED} / plain",
    ]


@pytest.mark.parametrize(("case", "networks"), [("infer", 8), ("step", 5)])
def test_both_sides_are_compiled(case, networks, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    rows = bench(capsys, case, TINY, "--runtime", "compile")
    assert len(compiled) == len(rows) == networks


def test_bench_alloc_of_another_network_also_where_means_are_observed(capsys):
    for subject in (TINY, SMALL):
        first, later = (rows := bench(capsys, "alloc", subject))
        assert first.startswith(f"{subject.model}, ")
        assert not first.startswith(f"{subject.model}, 0 slots closed")
        assert rows[later]["unit"] == "s"


def test_bench_data_compares_equal_batches(capsys, monkeypatch):
    pytest.importorskip("PIL", reason="the comparison is with Pillow (the train extra)")
    monkeypatch.setattr(cases, "_IMAGES", 2000)
    rows = bench(capsys, "data")
    assert rows["whole batches over PIL"]["value"] > 5  # 20 on idle cores
    assert rows["whole batches"]["unit"] == "images/s"
    real = cases.draw_epoch
    monkeypatch.setattr(cases, "draw_epoch", lambda *a, **k: real(*a, **{**k, "seed": 99}))
    with pytest.raises(AssertionError, match="the sides differ by"):
        cases.measure_data(Subject(), 1)


def test_bench_prints_a_table_for_people(capsys):
    assert main(["bench", "infer", "--model", TINY.model, "--image-size", "16"]) == 0
    table = capsys.readouterr().out
    assert "spread" in table
    assert f"compressed, {CLOSED} / plain" in table
    assert "CPU time on one thread" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "--model", "densenet40"], "--model, --image-size and --batch-size do not go"),
        (["step", "--runtime", "onnxruntime"], "`runtime` must be one of eager, compile; got 'onn"),
        (["alloc", "--runtime", "compile"], "`runtime` must be one of eager; got 'compile'"),
        (["infer", "--runtime", "onnx"], "one of eager, compile, onnxruntime"),
        (["step", "--model", "densenet4"], "Did you mean 'densenet40'"),
        (["step", "--model", "densenet40", "--image-size", "0"], "of at least 1, got '0'"),
    ],
)
def test_bench_refuses_in_one_line(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
