"""`make gpu-check` without a GPU, what `make bench-check` calls worse, and the rule for gathers."""

import json
import sys

import numpy as np
import pytest
import torch

from scripts import ROOT, load_script
from selectconv.deploy.parts import MACS_PER_PASS, narrow


def load(name):
    return load_script(f"benchmarks/{name}.py")


def test_gpu_check_without_cuda_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert load("gpu_check").main() == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "gpu-check: torch sees no CUDA device here; nothing was checked.\n"


def test_gpu_check_compares_output_and_both_gradients():
    script = load("gpu_check")
    case = script.draw_case((2, 6, 5, 4), 0)
    exact = script.results(script.reroute, *case)
    assert [tuple(tensor.shape) for tensor in exact] == [(2, 6, 5, 4), (2, 6, 5, 4), (6, 2)]
    for number in range(3):
        spoilt = [tensor.clone() for tensor in exact]
        spoilt[number].flatten()[0] += 1
        worst = max(map(script.largest_difference, spoilt, exact))
        assert worst > max(script.TOLERANCE.values())


@pytest.mark.parametrize(
    ("value", "spread", "verdict", "is_worse"),
    [
        (1.1, [1.0, 1.3], "ok", False),
        (1.2, [1.16, 1.3], "WORSE", True),
        (1.2, [1.0, 1.3], "noisy", False),
    ],
)
def test_bench_check_fails_beyond_the_margin(value, spread, verdict, is_worse):
    recorded = [{"case": "a step", "value": 1.0}]
    measured = [{"case": "a step", "value": value, "spread": spread}]
    new = {"case": "b", "value": 2.0, "spread": []}
    lines, result = load("check_ratios").compare(recorded, [*measured, new])
    assert [line.split()[0] for line in lines] == [verdict, "new"]
    assert result is is_worse


def test_bench_check_without_a_record_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    script = load("check_ratios")
    monkeypatch.setattr(script, "FILE", tmp_path / "ratios.json")
    monkeypatch.setattr(sys, "argv", ["check_ratios.py"])
    assert script.main() == 1
    assert capsys.readouterr().err == (
        "bench-check: there is no ratios.json: record it with --record.\n"
    )


def test_the_recorded_ratios_have_n_and_spread():
    recorded = json.loads((ROOT / "benchmarks" / "ratios.json").read_text())
    assert len(recorded) >= 10
    for row in recorded:
        low, high = row["spread"]
        assert low <= row["value"] <= high
        assert row["n"] >= 3


def test_the_rule_for_gathers_is_compress_own_and_close_to_the_best_for_what_was_measured():
    script = load("gather_cost")
    rows = script.read()
    excesses = {constant: script.excess(rows, constant) for constant in script.CONSTANTS}
    assert len(rows) > 100
    assert script.excess(rows, MACS_PER_PASS) <= 1.1 * min(excesses.values())
    assert max(excesses.values()) > 2 * min(excesses.values())  # the constant matters
    for row in rows:
        every, wanted = np.arange(row["inputs"]), np.arange(row["open"])
        saved = row["outputs"] * row["kernel"] ** 2 / MACS_PER_PASS
        is_narrowed = len(narrow(every, wanted, saved)) < len(every)
        assert is_narrowed == script.does_gather(row, MACS_PER_PASS)
