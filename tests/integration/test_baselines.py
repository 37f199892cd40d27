"""Runs with a baseline or a budget: to their end, interrupted and resumed, evaluated, refused."""

import functools
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

import selectconv as sc
from said import complaint
from selectconv.__main__ import main
from selectconv.lab.report.collect import read_run
from selectconv.lab.train import network
from selectconv.lab.train.network import load_checkpoint
from selectconv.lab.train.run_folder import ALLOCATION, LAST, METRICS, RunFolder
from selectconv.lab.zoo import create_model
from selectconv.lab.zoo.learned_group_conv import condense
from tiny_models import assert_same

SMALL = ["--data", "digits", "--subset", "64", "--test-subset", "40", "--batch-size", "32"]
SMALL += ["--epochs", "4", "--device", "cpu"]
RUNS = {
    "lgc": ["--model", "condensenet182", "--method", "lgc", "--group-lasso", "1e-4"],
    "slimming": ["--method", "slimming", "--bn-sparsity", "0.01", "--target-macs", "0.6"],
    "dealloc": ["--method", "dealloc", "--target-macs", "0.6"],
    "select": ["--method", "select", "--target-params", "0.6"],
}
IMAGE = torch.zeros(1, 1, 8, 8)
NARROW = {"growth_rate": 8, "units": (2, 2, 2)}
DENSE = sc.count(create_model("densenet40", in_channels=1, **NARROW), IMAGE)

pytestmark = pytest.mark.filterwarnings("ignore:.*target_macs.*slimming reached:UserWarning")


@pytest.fixture(autouse=True)
def _narrow_network(monkeypatch):
    def narrow(name, **options):
        if name == "condensenet182":
            return create_model(name, growth_rates=(4, 4, 4), units=(1, 1, 1), **options)
        return create_model(name, **NARROW, **options)

    monkeypatch.setattr(network, "create_model", narrow)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@functools.cache
def finished(kind, folders):
    """A run that nobody disturbed; made once for all tests."""
    out = folders / kind
    assert main(["train", *SMALL, *RUNS[kind], "--out", str(out)]) == 0
    return out


def interrupt_after(monkeypatch, lines):
    """Let the disk fail when a line of metrics is to be written for the N-th time."""
    write, left = RunFolder.write, [lines]

    def fail_later(self, contents):
        if METRICS in contents:
            left[0] -= 1
            if left[0] < 0:
                raise sc.SelectConvError("no space left")
        write(self, contents)

    monkeypatch.setattr(RunFolder, "write", fail_later)


def load_run(folder):
    return network.load_run(folder).model


@pytest.mark.parametrize(
    ("kind", "epochs"),
    [("lgc", 1), ("slimming", 1), ("slimming", 3), ("dealloc", 1), ("select", 1)],
)
def test_interrupted_and_resumed_ends_with_the_same_bits(
    kind, epochs, folders, tmp_path, monkeypatch, capsys
):
    whole, out = finished(kind, folders), tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_after(patch, epochs)
        assert main(["train", *SMALL, *RUNS[kind], "--out", str(out)]) == 1
    assert len(RunFolder(out).read(METRICS)) == epochs
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert_same(load_checkpoint(RunFolder(out)), load_checkpoint(RunFolder(whole)))
    assert (out / LAST).read_bytes() == (whole / LAST).read_bytes()
    assert (out / ALLOCATION).read_text() == (whole / ALLOCATION).read_text()


@pytest.mark.parametrize("kind", RUNS)
def test_eval_finds_what_the_last_epoch_had(kind, folders, capsys):
    folder = finished(kind, folders)
    last = RunFolder(folder).read(METRICS)[-1]
    assert main(["eval", str(folder), "--best"]) == 0
    capsys.readouterr()
    assert main(["eval", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Nothing was closed or cut after the last epoch.
    assert found["test_error"] == last["test_error"]
    assert found["test_loss"] == pytest.approx(last["test_loss"], rel=1e-6)


def test_lgc_ends_condensed(folders):
    rows = RunFolder(finished("lgc", folders)).read(METRICS)
    closed = [row["closed"] for row in rows]
    # Inputs of the three 1x1 convs, for each of 4 groups; 3/4 of them go.
    assert closed == [4 * (8 + 12 + 16) * part // 4 for part in (1, 3, 3, 3)]
    model = load_run(finished("lgc", folders))
    before = model(IMAGE)
    dense = sc.count(model, IMAGE)
    condense(model)
    torch.testing.assert_close(model(IMAGE), before, rtol=1e-4, atol=1e-5)
    assert sc.count(model, IMAGE).params == dense.params - 3 * 16 * (8 + 12 + 16) // 4
    [first, second] = RunFolder(finished("lgc", folders)).read(ALLOCATION)
    assert (first["epoch"], second["epoch"]) == (0, 1)


def test_slimming_ends_smaller(folders):
    folder = finished("slimming", folders)
    small = sc.count(load_run(folder), IMAGE)
    assert small.macs / DENSE.macs == pytest.approx(0.6, abs=0.03)
    size = sum(t.numel() for name, t in load_file(folder / LAST).items() if "running" not in name)
    assert size - small.params < 30, "nothing but counters besides the parameters"
    [line] = RunFolder(folder).read(ALLOCATION)
    assert line["epoch"] == 1
    closed = [row["closed"] for row in RunFolder(folder).read(METRICS)]
    cut = sum(len(layer["closed"]) for layer in line["layers"].values())
    assert closed == [0, cut, cut, cut]


def test_a_report_knows_the_size_of_what_was_condensed_or_cut(folders, tmp_path):
    model = condense(load_run(finished("lgc", folders)))
    assert read_run(finished("lgc", folders)).size == sc.count(model, IMAGE)
    folder = finished("slimming", folders)
    assert read_run(folder).size == sc.count(load_run(folder), IMAGE)
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns(LAST))
    assert read_run(tmp_path / "run").size is None


@pytest.mark.parametrize(("kind", "name"), [("dealloc", "macs"), ("select", "params")])
def test_a_run_with_a_budget_ends_at_it(kind, name, folders):
    found = sc.count(load_run(finished(kind, folders)), IMAGE)
    assert getattr(found, name) / getattr(DENSE, name) == pytest.approx(0.6, rel=0.01)


@pytest.mark.parametrize("kind", RUNS)
def test_compress_writes_what_the_run_ended_with(kind, folders, tmp_path, capsys):
    folder, file = finished(kind, folders), tmp_path / "small.safetensors"
    assert main(["compress", str(folder), "--out", str(file)]) == 0
    model, small = load_run(folder), sc.load_compressed(file)
    x = torch.randn(3, *IMAGE.shape[1:])
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    if kind == "lgc":
        condense(model)
    assert sc.count(small, IMAGE).params == sc.count(model, IMAGE).params


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--method", "lgc"], 2, "needs `model` condensenet182, got 'densenet40'"),
        (["--target-macs", "0.5", "--target-params", "0.5"], 2, "cannot be combined"),
        (
            ["--target-macs", "2"],
            2,
            "`target_macs` must be a number above 0 and at most 1, got 2.0",
        ),
        (["--target-macs", "half"], 2, "`target_macs` must be a number"),
        (["--target-macs", "0.5", "--method", "plain"], 2, "got 'plain'"),
        (["--target-macs", "0.01"], 2, "cannot be reached"),
        (
            ["--target-macs", "0.001", "--method", "slimming"],
            2,
            "0.001 cannot be reached: slimming",
        ),
        (["--method", "slimming", "--seed", "1"], 1, "pip install 'selectconv[pruning]'"),
    ],
)
def test_what_is_wrong_is_one_line(flags, code, message, tmp_path, monkeypatch, capsys):
    if code == 1:
        monkeypatch.setitem(sys.modules, "torch_pruning", None)
    assert main(["train", *SMALL, *flags, "--out", str(tmp_path / "run")]) == code
    assert message in complaint(capsys)
