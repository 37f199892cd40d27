"""Comparisons on every image that was not trained on: the sequence of questions, equivalence."""

import json
import math

import pytest

from fake_runs import seal, write_run
from selectconv.lab.report.compare.answers import answer
from selectconv.lab.report.compare.findings import state_findings
from selectconv.lab.report.compare.groups import group_runs
from selectconv.lab.report.compare.statistics import equivalence_p
from selectconv.lab.report.compare.tables import HEADER, build_table
from selectconv.lab.report.runs.collect import collect

PLAIN = [(30.0, 0.90), (31.0, 0.93), (32.0, 0.95)]  # held-out error and loss by seed


def write_pair(folder, select):
    for seed, (plain, other) in enumerate(zip(PLAIN, select, strict=True)):
        # The errors on the test images say the opposite, and are not asked.
        write_run(folder / f"p{seed}", method="plain", seed=seed, error=20.0, holdout=plain)
        write_run(folder / f"s{seed}", method="select", seed=seed, error=25.0 + seed, holdout=other)


def find(group, method="select"):
    [found] = [one for key, one in answer(group).items() if key.method == method]
    return found


def cells(table, start):
    [row] = [row for row in table.rows if row[0].startswith(start)]
    return dict(zip(HEADER, row, strict=True))


def test_loss_first_then_error(tmp_path):
    # Differences of the loss: -0.02, -0.03, -0.04; of the error: -1, -2, -3.
    write_pair(tmp_path, [(29.0, 0.88), (29.0, 0.90), (29.0, 0.91)])
    [group] = group_runs(collect([tmp_path]).runs)
    loss, error = find(group).questions
    assert (loss.measure, error.measure) == ("loss", "error")
    # Two degrees of freedom: p = 1 - t / sqrt(t^2 + 2), with t = mean / (std / sqrt(3)).
    for question, t in ((loss, 3 * math.sqrt(3)), (error, 2 * math.sqrt(3))):
        assert question.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
        assert question.counts
    table = build_table(group)
    select = cells(table, "+D+R zero+shift")
    assert select["held-out error %"] == "29.00 ± 0.00"
    assert select["held-out loss"] == "0.8967 ± 0.0153"
    assert select["test error %, last epoch"] == "26.00 ± 1.00"
    assert select["change"] == "-6.45 %"
    assert select["p, loss"] == f"{loss.p:.4f}"
    assert "1,701 images that were not trained on" in table.caption
    first, second = state_findings(group, answer(group))[:2]
    assert "held-out loss 0.9267 to 0.8967" in first
    assert first.endswith("lower at the level of 0.05.")
    assert "held-out error 31.00 % to 29.00 %" in second


def test_another_rule_is_compared_with_plain_and_then_with_the_papers(tmp_path):
    write_pair(tmp_path, [(29.0, 0.88), (29.5, 0.90), (30.0, 0.91)])
    gradient = [(28.0, 0.86), (28.0, 0.88), (28.0, 0.88)]
    for seed, scores in enumerate(gradient):
        write_run(
            tmp_path / f"g{seed}",
            method="select",
            seed=seed,
            holdout=scores,
            gone={"growth": "gradient"},
        )
    [group] = group_runs(collect([tmp_path]).runs)
    found = {key.growth: one for key, one in answer(group).items()}
    assert found["importance"].of_rule == ()
    assert [asked.against.key.method for asked in found["gradient"].questions] == ["plain"] * 2
    loss, error = found["gradient"].of_rule
    assert loss.against.key.growth == error.against.key.growth == "importance"
    assert (loss.before, loss.after) == pytest.approx((0.8967, 0.8733), abs=1e-4)
    # Differences of the loss: -0.02, -0.02, -0.03.
    t = 7 / 3 / (1 / math.sqrt(3) / math.sqrt(3))
    assert loss.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    lines = state_findings(group, answer(group))
    name = "+D+R zero+shift (select), growth by gradient"
    assert [line.split(", 3 seeds")[0] for line in lines[:6]] == [
        *["+D+R zero+shift (select) against plain"] * 2,
        *[f"{name} against plain"] * 2,
        *[f"{name} against +D+R zero+shift (select)"] * 2,
    ]


def test_an_error_does_not_count_where_the_losses_do_not_differ(tmp_path):
    write_pair(tmp_path, [(29.0, 0.89), (29.9, 0.97), (31.0, 0.93)])
    [group] = group_runs(collect([tmp_path]).runs)
    loss, error = find(group).questions
    assert loss.p > 0.05 > error.p
    assert not error.counts
    assert "does not count" in state_findings(group, answer(group))[1]


def test_the_best_plain_training_is_the_baseline_measure_by_measure(tmp_path):
    write_pair(tmp_path, [(29.0, 0.88), (29.0, 0.90), (29.0, 0.91)])
    lower = [(29.5, 0.99), (30.0, 0.99), (30.5, 0.99)]  # a lower error, a higher loss
    for seed, result in enumerate(lower):
        write_run(
            tmp_path / f"q{seed}", method="plain", seed=seed, holdout=result, weight_decay=0.5
        )
    [group] = group_runs(collect([tmp_path]).runs)
    loss, error = find(group).questions
    assert (loss.before, error.before) == (pytest.approx(0.92667, abs=1e-4), 30.0)
    assert loss.against.name == "plain (weight_decay 0.0001)"
    assert error.against.name == "plain (weight_decay 0.5)"
    assert [key.method for key in answer(group)] == ["select"]  # nobody asks about plain
    names = [row[0] for row in build_table(group).rows]
    assert names[0] == "plain (weight_decay 0.0001)"
    assert names[2].startswith("+D+R zero+shift (select) (weight_decay 0.0001) [gamma")


def test_without_held_out_images_everywhere_the_test_error_is_compared(tmp_path):
    write_pair(tmp_path, [(29.0, 0.88), (29.0, 0.90), (29.0, 0.91)])
    write_run(tmp_path / "old", method="shift", error=22.0)
    [group] = group_runs(collect([tmp_path]).runs)
    assert group.endpoint == "test"
    [question] = find(group).questions
    assert (question.measure, question.after) == ("error", 26.0)


def test_equivalence_by_hand(tmp_path):
    # Differences 0.1, 0.0, 0.2: mean 0.1, std 0.1; the nearer bound is 0.4 away.
    write_pair(tmp_path, [(30.1, 0.9), (31.0, 0.9), (32.2, 0.9)])
    [group] = group_runs(collect([tmp_path]).runs, margin=0.5)
    t = 0.4 / (0.1 / math.sqrt(3))
    p = (1 - t / math.sqrt(t * t + 2)) / 2
    assert find(group).p_equivalent == pytest.approx(p)
    table = build_table(group)
    assert cells(table, "+D+R zero+shift")["p, no loss"] == f"{p:.4f}"
    assert "within 0.5 points of plain's error: shown" in " ".join(table.findings)
    assert "within 0.5 points" in table.caption
    # Beyond the margin nothing is shown, on either side.
    for by in (0.7, -0.7):
        far = {0: 10.0 + by, 1: 11.1 + by, 2: 12.2 + by}
        assert equivalence_p({0: 10.0, 1: 11.0, 2: 12.0}, far, 0.5) > 0.5
    assert math.isnan(equivalence_p({0: 1.0}, {0: 1.0}, 0.5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no holdout.json"),
        ("{", "cannot be read"),
        ("[1]", "does not hold"),
        ({"images": 5, "error": "low", "loss": 1.0}, "`error` is not a number: 'low'"),
        ({"images": 5, "error": 1.0, "loss": float("nan")}, "`loss` is nan"),
    ],
)
def test_a_damaged_result_leaves_the_run_out(tmp_path, content, message):
    run = write_run(tmp_path / "run", method="plain", holdout=(30.0, 0.9))
    file = run / "holdout.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    seal(run)
    found = collect([tmp_path])
    assert found.runs == []
    assert message in found.left_out[0]
