"""Damaged runs are named and left out; the others are reported."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fake_runs import seal, write_run
from selectconv.lab.cli.main import main
from selectconv.lab.report.build import draw_group
from selectconv.lab.report.compare.groups import group_runs
from selectconv.lab.report.runs.collect import collect
from selectconv.lab.report.runs.examine import examine


def change_line(file, number, **values):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[number] |= values
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def in_metrics(**values):
    return lambda run: change_line(run / "metrics.jsonl", 2, **values)


def in_allocation(**values):
    return lambda run: change_line(run / "allocation.jsonl", 0, **values)


def write(name, text):
    return lambda run: (run / name).write_text(text)


def make_folder(name):
    def damage(run):
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def reverse(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in reversed(lines)))


def set_option(**options):
    def damage(run):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model_options"] |= options
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    return damage


LAYER = "blocks.0.0.pointwise.conv"
DAMAGES = {
    "text for a number": (in_metrics(test_error="abc"), "`test_error` is not a number: 'abc'"),
    "null": (in_metrics(seconds=None), "`seconds` is not a number: None"),
    "NaN": (in_metrics(test_error=float("nan")), "`test_error` is nan"),
    "infinity": (in_metrics(test_loss=float("inf")), "`test_loss` is inf"),
    "negative": (in_metrics(moved=-1), "`moved` is -1"),
    "a list for a line": (write("metrics.jsonl", "[1, 2]\n" * 6), "line 1, is not that of epoch 0"),
    "order": (reverse, "line 1, is not that of epoch 0"),
    "metrics are a folder": (make_folder("metrics.jsonl"), "cannot be read: Is a directory"),
    "log is a folder": (make_folder("allocation.jsonl"), "cannot be read: Is a directory"),
    "unknown layer": (
        in_allocation(layers={"no.such": {"closed": [0], "opened": []}}), "no layer 'no.such'",
    ),
    "slot out of range": (
        in_allocation(layers={LAYER: {"closed": [900], "opened": []}}), "the log names 900",
    ),
    "source out of range": (
        in_allocation(layers={LAYER: {"closed": [0], "opened": [[0, 900, None]]}}),
        "the log names 900",
    ),
    "negative slot": (
        in_allocation(layers={LAYER: {"closed": [-1], "opened": []}}), "count from 0, got -1",
    ),
    "plan without slots": (
        in_allocation(layers={LAYER: {"opened": []}}),
        "allocation.jsonl, line 1: A layer's plan needs `closed`",
    ),
    "fraction of a slot": (
        in_allocation(layers={LAYER: {"closed": [0.5], "opened": []}}),
        "A layer's plan needs `closed`",
    ),
    "line without layers": (in_allocation(layers=None), "line 1: a plan must be a dict by layer"),
    "epoch after the last": (in_allocation(epoch=6), "line 1: `epoch` must be from 0 to 5, got 6"),
    "log of a list": (write("allocation.jsonl", "[1]\n"), "line 1: a row of the log needs `epoch`"),
    "no log": (write("allocation.jsonl", ""), "by allocation.jsonl"),
    "unknown option": (set_option(growth_rat=8), "growth_rat"),
    "wrong option": (set_option(growth_rate="a"), "growth_rate"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_is_named_and_the_rest_is_reported(kind, tmp_path, capsys):
    damage, reason = DAMAGES[kind]
    write_run(tmp_path / "p", method="plain")
    run = write_run(tmp_path / "s", method="select")
    damage(run)
    seal(run)  # somebody wrote what a run would not, digests and all
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert f"{tmp_path / 's'}: " in line
    assert reason in line
    assert "1 run" in shown.out


def test_an_odd_environment_does_not_matter(tmp_path):
    run = write_run(tmp_path / "p", method="plain")
    (run / "env.json").write_text('{"versions": ["0.1"]}')
    seal(run)
    found = collect([tmp_path])
    assert len(found.runs) == 1
    assert "written by selectconv None" in found.notes[0]


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
    [reason] = found.reasons.values()
    assert f"{name} is damaged" in reason


def test_runs_of_results_are_found_from_its_top(tmp_path):
    write_run(tmp_path / "results" / "ablation" / "runs" / "p", method="plain")
    assert len(collect([tmp_path / "results"]).runs) == 1


@pytest.mark.parametrize("damage", ["nan", "index"])
def test_weights_that_cannot_be_drawn_are_said_on_the_page(damage, tmp_path):
    run = write_run(tmp_path / "s", method="select", weights=True)
    weights = load_file(run / "last.safetensors")
    for name, tensor in weights.items():
        if damage == "nan" and tensor.is_floating_point():
            weights[name] = torch.full_like(tensor, torch.nan)
        if damage == "index" and name.endswith(".index"):
            weights[name] = tensor + 1000
    save_file(weights, run / "last.safetensors")
    seal(run)
    found = examine(collect([tmp_path]))
    figures = draw_group(group_runs(found.runs)[0], "g")
    assert any(figure.problem.startswith("It could not be drawn") for figure in figures)
    assert any(figure.body for figure in figures)


def test_the_command_that_repeats_a_run_survives_spaces(tmp_path):
    write_run(tmp_path / "my run", method="plain")
    [run] = collect([tmp_path]).runs
    assert f"--config '{tmp_path}/my run/config.yaml'" in run.command
