"""Damaged runs are named and left out; the others are reported."""

import json
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import selectconv as sc
from fake_runs import seal, write_run
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.cli.main import main
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.report.collect import CLOSED, MOVED, OWN, collect, read_run
from selectconv.lab.train.network import build_model

METRICS, LOG = "metrics.jsonl", "allocation.jsonl"
STEP = '{"epoch": 0, "layers": {"%s": {"closed": [%d], "opened": [%s]}}}'
LAYER = "blocks.0.0.pointwise.conv"
LINE = r"(?m)^.*$"  # the first one is replaced
# A file of a run, what is replaced in it, by what, and what is said; None: the file is removed.
DAMAGES = {
    "no test images": (
        METRICS,
        '"test_error": 20.0',
        '"test_error": null',
        "it has no test images",
    ),
    "an epoch is missing": (METRICS, r".*\n\Z", "", "it is 'done' and has 5 of 6 epochs"),
    "not done": ("status.json", "done", "running", "it is 'running' and has 6 of 6"),
    "unknown layer": (LOG, LINE, STEP % ("no.such", 0, ""), "no.such"),
    "slot out of range": (LOG, LINE, STEP % (LAYER, 900, ""), "900"),
    "source out of range": (LOG, LINE, STEP % (LAYER, 0, "[0, 900, null]"), "900"),
    "epoch after the last": (LOG, '"epoch": 0', '"epoch": 6', "does not lead to what"),
    "no log": (LOG, r"(?s).*", "", "does not lead to what metrics.jsonl"),
    "no environment": ("env.json", None, "", "env.json"),
    "no held-out result": ("holdout.json", None, "", "holdout.json"),
    "unknown option": ("config.yaml", "growth_rate", "growth_rat", "growth_rat"),
    "wrong option": ("config.yaml", "growth_rate: 4", "growth_rate: a", "growth_rate"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_is_named_and_the_rest_is_reported(kind, tmp_path, capsys):
    name, old, new, reason = DAMAGES[kind]
    write_run(tmp_path / "p", method="plain")
    run = write_run(tmp_path / "s", method="select", holdout=(30.0, 0.9))
    text = (run / name).read_text()
    (run / name).unlink()
    if old is not None:
        (run / name).write_text(re.sub(old, new, text, count=1))
    seal(run)  # somebody wrote what a run would not, digests and all
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert f"{tmp_path / 's'}: " in line
    assert reason in line
    assert "1 run" in shown.out


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "env.json", "metrics.jsonl", "allocation.jsonl", "holdout.json", "status.json"],
)
def test_one_wrong_bit_in_any_file_of_a_run_is_named(name, tmp_path):
    path = write_run(tmp_path / "p", method="select", holdout=(20.0, 1.0)) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = collect([tmp_path])
    assert found.runs == []
    [reason] = found.left_out.values()
    assert f"{name} is damaged" in reason


def test_runs_of_results_are_found_from_its_top(tmp_path):
    write_run(tmp_path / "results" / "ablation" / "runs" / "p", method="plain")
    assert len(collect([tmp_path / "results"]).runs) == 1


def test_the_command_that_repeats_a_run_survives_spaces(tmp_path):
    write_run(tmp_path / "my run", method="plain")
    [run] = collect([tmp_path]).runs
    assert f"--config '{tmp_path}/my run/config.yaml'" in run.command


def test_replay_ends_where_the_network_ended(tmp_path):
    path = write_run(tmp_path / "a", method="select", weights=True)
    run, state = read_run(path), load_file(path / "last.safetensors")
    for layer in run.layers:
        assert layer.source == state[f"{layer.name}.index"].tolist()
        for slot, last in enumerate(layer.states[-1]):
            is_open, is_moved = (state[f"{layer.name}.{name}"][slot] for name in ("gate", "moved"))
            assert last == (CLOSED if not is_open else MOVED if is_moved else OWN)
    lines = (run.path / "allocation.jsonl").read_text().splitlines()
    steps = [item for line in lines for item in json.loads(line)["layers"].items()]
    closed = Counter((name, slot) for name, layer in steps for slot in layer["closed"])
    copied = Counter((name, source) for name, layer in steps for _, source, _ in layer["opened"])
    assert closed == {(one.name, k): n for one in run.layers for k, n in one.closed.items()}
    assert copied == {(one.name, k): n for one in run.layers for k, n in one.copied.items()}
    assert any(MOVED in layer.states[-1] for layer in run.layers)
    assert any(CLOSED in layer.states[-1] for layer in run.layers)


@pytest.mark.parametrize(
    ("method", "more"),
    [*((name, {}) for name in ("plain", "select", "zero", "shift", "dealloc")),
     ("dealloc", {"granularity": "filter"})],
    ids=str,
)  # fmt: skip
def test_the_deployed_cost_is_that_of_what_compress_writes(method, more, tmp_path):
    path = write_run(tmp_path / "run", method=method, weights=True, **more)
    run = read_run(path)
    model = build_model(run.config, dataset_info("digits"))
    model.load_state_dict(load_file(path / "last.safetensors"))
    small = sc.compress(model.eval(), torch.zeros(1, 1, 8, 8))
    assert run.deployed == sc.count(small, torch.zeros(1, 1, 8, 8))
    assert (run.deployed.params > run.size.params) == (method in ("select", "shift"))
    assert (run.metrics[-1]["closed"] > 0) == (method in ("select", "zero", "dealloc"))


def test_closed_slots_do_not_count(tmp_path):
    plain = read_run(write_run(tmp_path / "p", method="plain"))
    model = build_model(plain.config, dataset_info("digits"))
    assert (plain.size.params, plain.size.macs) == (
        count_params(model),
        count_macs(model, (1, 8, 8)),
    )
    run = read_run(write_run(tmp_path / "d", method="dealloc"))
    model = build_model(run.config, dataset_info("digits"))
    for layer in run.layers:
        closed = [slot for slot, state in enumerate(layer.states[-1]) if state == CLOSED]
        model.get_submodule(layer.name).close(closed)
    small = sc.compress(model.eval(), torch.zeros(1, 1, 8, 8))
    assert run.size.params == count_params(small) < plain.size.params
    assert run.size.macs == count_macs(small, (1, 8, 8)) < plain.size.macs
