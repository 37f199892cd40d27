"""Damaged runs are named and left out; the others are reported."""

import json
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


def change_line(file, number, **values):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[number] |= values
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def in_metrics(**values):
    return lambda run: change_line(run / "metrics.jsonl", -1, **values)


def in_allocation(**values):
    return lambda run: change_line(run / "allocation.jsonl", 0, **values)


def write(name, text):
    return lambda run: (run / name).write_text(text)


def cut_metrics(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))


def replace(name, old, new):
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


LAYER = "blocks.0.0.pointwise.conv"
DAMAGES = {
    "no test images": (in_metrics(test_error=None), "it has no test images"),
    "an epoch is missing": (cut_metrics, "incomplete: it is 'done' and has 5 of 6 epochs"),
    "not done": (write("status.json", '{"status": "running"}'), "it is 'running' and has 6 of 6"),
    "unknown layer": (
        in_allocation(layers={"no.such": {"closed": [0], "opened": []}}), "no layer 'no.such'",
    ),
    "slot out of range": (
        in_allocation(layers={LAYER: {"closed": [900], "opened": []}}), "900",
    ),
    "source out of range": (
        in_allocation(layers={LAYER: {"closed": [0], "opened": [[0, 900, None]]}}),
        "900",
    ),
    "epoch after the last": (in_allocation(epoch=6), "`epoch` must be from 0 to 5, got 6"),
    "no log": (write("allocation.jsonl", ""), "does not lead to what metrics.jsonl"),
    "no environment": (lambda run: (run / "env.json").unlink(), "env.json"),
    "no held-out result": (lambda run: (run / "holdout.json").unlink(), "holdout.json"),
    "unknown option": (replace("config.yaml", "growth_rate", "growth_rat"), "growth_rat"),
    "wrong option": (replace("config.yaml", "growth_rate: 4", "growth_rate: a"), "growth_rate"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_is_named_and_the_rest_is_reported(kind, tmp_path, capsys):
    damage, reason = DAMAGES[kind]
    write_run(tmp_path / "p", method="plain")
    run = write_run(tmp_path / "s", method="select", holdout=(30.0, 0.9))
    damage(run)
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
