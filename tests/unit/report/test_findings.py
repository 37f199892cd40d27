"""Which runs are compared, and what is found: the questions, their sequence, the statistics."""

import csv
import io
import math
import random

import pytest
from scipy import stats

import selectconv as sc
from fake_runs import SETTINGS, write_run
from selectconv.lab.report.collect import collect
from selectconv.lab.report.compare import group_runs
from selectconv.lab.report.findings import find_out
from selectconv.lab.report.statistics import compare, correct_holm
from selectconv.lab.report.tables import HEADER, PAPER, build_table, write_csv
from selectconv.lab.reproduce.grid import Grid, PlannedRun, load_grid

PLAIN = [(30.0, 0.90), (31.0, 0.93), (32.0, 0.95)]  # held-out error and loss by seed
SELECT = [(29.0, 0.88), (29.0, 0.90), (29.0, 0.91)]
NAME = "+D+R zero+shift (select)"


def write_pair(folder, select=SELECT):
    for seed, (plain, other) in enumerate(zip(PLAIN, select, strict=True)):
        # The errors on the test images say the opposite, and are not asked.
        write_run(folder / f"p{seed}", method="plain", seed=seed, error=20.0, holdout=plain)
        write_run(folder / f"s{seed}", method="select", seed=seed, error=25.0 + seed, holdout=other)


def write_errors(folder, **errors):
    for method, values in errors.items():
        for seed, error in enumerate(values):
            write_run(folder / f"{method}{seed}", method=method, seed=seed, error=error)
    return collect([folder]).runs


def plan(*methods, **settings):
    """Return a grid with runs of seeds 0 to 2 that are named like those of `write_errors`."""
    runs = [
        PlannedRun(f"{method}{seed}", {**SETTINGS, "method": method, "seed": seed})
        for method in methods
        for seed in range(3)
    ]
    return Grid("table1", "", "", "", "", tuple(runs), **settings)


def ask(folder, grid=None):
    """Return the findings of the only comparison in a folder, without those nobody asked for."""
    runs = collect([folder]).runs
    [group] = group_runs(runs) if grid is None else group_runs(runs, grid)
    return [found for found in find_out(group) if "beforehand" not in found.verdict]


def p_of(t):
    """Return p of a t-test with two degrees of freedom."""
    return 1 - t / math.sqrt(t * t + 2)


def test_loss_first_then_error(tmp_path):
    # Differences of the loss: -0.02, -0.03, -0.04; of the error: -1, -2, -3.
    write_pair(tmp_path)
    loss, error = ask(tmp_path)
    assert (loss.measure, error.measure) == ("loss", "error")
    assert loss.p == pytest.approx(p_of(3 * math.sqrt(3)))
    assert error.p == pytest.approx(p_of(2 * math.sqrt(3)))
    assert loss.verdict == "lower at the level of 0.05"
    assert f"{NAME} against plain, 3 seeds: held-out loss 0.9267 to 0.8967," in loss.sentence
    assert "held-out error 31.00 % to 29.00 %, a change of -6.45 %" in error.sentence


def test_an_error_is_not_tested_where_the_losses_do_not_differ(tmp_path):
    write_pair(tmp_path, [(29.0, 0.89), (29.9, 0.97), (31.0, 0.93)])
    loss, error = ask(tmp_path)
    assert loss.p > 0.05 > error.p
    assert loss.verdict.startswith("no difference found at the level of 0.05; a change of ")
    assert error.verdict == "not tested: the preceding test was not significant"


def test_the_smallest_visible_change_is_found_in_four_of_five_trials():
    # By simulation: pairs whose true difference is the one that is called visible.
    draw, before = random.Random(0), dict.fromkeys(range(5), 100.0)
    differences = (-2, 2, -2, 2, 0)  # of standard deviation 2
    least = compare(before, {s: 100.0 + d for s, d in enumerate(differences)}).least
    trials = [{s: 100 + least + draw.gauss(0, 2) for s in range(5)} for _ in range(1000)]
    found = [compare(before, trial).p < 0.05 for trial in trials]
    assert sum(found) / 1000 == pytest.approx(0.8, abs=0.04)


def test_several_networks_are_asked_in_the_order_of_their_contest(tmp_path):
    questions = [
        {"arm": "thin", "against": "plain", "apart": True},  # not lower: nothing depends on it
        {"arm": "slots", "against": "plain", "margin": 3},
        {"arm": "slots", "against": "thin", "measure": "loss"},
        {"arm": "plain", "against": "thin"},
        {"arm": "slots", "against": "thin"},
        {"arm": "slots", "against": "thin", "measure": "loss", "apart": True},
    ]
    runs = []
    for arm, method, width, scores in (
        ("slots", "dealloc", 4, [(31.0, 0.9), (32.5, 0.93), (33.0, 0.95)]),
        ("thin", "plain", 3, [(33.0, 1.1), (33.0, 1.11), (33.0, 1.13)]),
        ("plain", "plain", 4, PLAIN),
    ):
        for seed, holdout in enumerate(scores):
            options = {"growth_rate": width, "units": [1, 1]}
            settings = {**SETTINGS, "method": method, "model_options": options, "seed": seed}
            runs.append(PlannedRun(f"{arm}-{seed}", settings, contest="few", arm=arm))
            write_run(tmp_path / runs[-1].name, **settings, holdout=holdout)
    contest = {"title": "Few", "test": "In order.", "questions": questions}
    grid = Grid("table2", "", "", "", "", tuple(runs), contests={"few": contest})
    first, within, loss, error, last, second = ask(tmp_path, grid)
    apart = [second, first]
    assert within.verdict == "shown to be within 3 points"
    assert (loss.row.name, loss.against.name) == ("slots", "thin")
    assert loss.verdict == "lower at the level of 0.05"
    assert error.verdict.startswith("no difference found")
    assert last.verdict == "not tested: the preceding test was not significant"
    assert [one.test for one in apart] == [" after Holm's correction"] * 2
    assert [one.p / one.result.p for one in apart] == pytest.approx([2, 1])  # the smaller twice
    assert not any("not tested" in one.verdict for one in apart)
    [group] = group_runs(collect([tmp_path]).runs, grid)
    table = build_table(group)
    assert table.title == "Few"
    assert [row["method"].split()[0] for row in table.rows] == ["slots", "thin", "plain"]
    assert "In order." in table.caption


def test_a_setting_that_is_gone_is_compared_with_plain_and_then_with_its_absence(tmp_path):
    write_pair(tmp_path, [(29.0, 0.88), (29.5, 0.90), (30.0, 0.91)])
    for seed, scores in enumerate([(28.0, 0.86), (28.0, 0.88), (28.0, 0.88)]):
        run = {"method": "select", "seed": seed, "holdout": scores}
        write_run(tmp_path / f"g{seed}", **run, gone={"growth": "gradient"})
    findings = ask(tmp_path)
    assert [found.sentence.split(", 3 seeds")[0] for found in findings] == [
        *[f"{NAME} against plain"] * 2,
        *[f"{NAME}, growth gradient against plain"] * 2,
        *[f"{NAME}, growth gradient against {NAME}"] * 2,
    ]
    loss = findings[4].result
    assert (loss.before, loss.after) == pytest.approx((0.8967, 0.8733), abs=1e-4)
    alone = [run for run in collect([tmp_path]).runs if run.gone or run.config.method == "plain"]
    assert {found.against.name for found in find_out(group_runs(alone)[0])} == {"plain"}
    # Differences of the loss: -0.02, -0.02, -0.03.
    assert findings[4].p == pytest.approx(p_of(7 / 3 / (1 / math.sqrt(3) / math.sqrt(3))))


def test_the_best_plain_training_is_the_baseline_measure_by_measure(tmp_path):
    write_pair(tmp_path)
    lower = [(29.5, 0.99), (30.0, 0.99), (30.5, 0.99)]  # a lower error, a higher loss
    for seed, result in enumerate(lower):
        run = {"method": "plain", "seed": seed, "holdout": result, "weight_decay": 0.5}
        write_run(tmp_path / f"q{seed}", **run)
    loss, error = ask(tmp_path)  # nobody asks about plain
    assert (loss.result.before, error.result.before) == (pytest.approx(0.92667, abs=1e-4), 30.0)
    assert loss.against.name == "plain (weight_decay 0.0001)"
    assert error.against.name == "plain (weight_decay 0.5)"
    assert error.row.name == f"{NAME} (weight_decay 0.0001)"


def test_without_held_out_images_everywhere_the_test_error_is_compared(tmp_path):
    write_pair(tmp_path)
    write_run(tmp_path / "old", method="shift", error=22.0)
    [finding] = ask(tmp_path)
    assert (finding.measure, finding.result.after) == ("error", 26.0)
    assert "test error 20.00 % to 26.00 %" in finding.sentence


def test_equivalence_by_hand(tmp_path):
    # Differences 0.1, 0.0, 0.2: mean 0.1, std 0.1; the nearer bound is 0.4 away.
    write_pair(tmp_path, [(30.1, 0.9), (31.0, 0.9), (32.2, 0.9)])
    *_, finding = ask(tmp_path, plan(margin=0.5))
    assert finding.p == pytest.approx(p_of(0.4 / (0.1 / math.sqrt(3))) / 2)
    assert finding.verdict == "shown to be within 0.5 points"
    *_, finding = ask(tmp_path, plan(margin=0.15))
    assert finding.verdict == "not shown to be within 0.15 points"


def test_second_questions_are_corrected_also_for_those_without_an_answer(tmp_path):
    # Differences -1, -1.5 and -1, -1.2: with one degree of freedom p is 2 atan(1 / t) / pi.
    errors = {"plain": (20.0, 22.0), "zero": (19.0, 20.5), "random": (19.0, 20.8)}
    write_errors(tmp_path, select=(19.0, 20.5), **errors)
    five, eleven = (2 * math.atan(1 / t) / math.pi for t in (5, 11))
    select, zero, random = ask(tmp_path)
    assert (select.p, zero.p, random.p) == pytest.approx((five, five, 2 * eleven))
    assert (select.test, zero.test) == ("", " after Holm's correction")
    _, zero, random = ask(tmp_path, plan("dealloc", "shift"))
    assert (zero.p, random.p) == pytest.approx((3 * five, 4 * eleven))
    assert zero.verdict == "preliminary, 6 planned runs are missing"


def test_the_first_question_is_the_grid_s(tmp_path):
    write_errors(
        tmp_path, plain=(20.0, 22.0, 21.0), dealloc=(19.0, 20.9, 19.8), zero=(19.0, 20.9, 19.8)
    )
    corrected, _ = ask(tmp_path)
    own, other = ask(tmp_path, plan(first=("dealloc",)))
    assert own.row.method == "dealloc"
    assert (own.test, other.test) == ("", "")
    assert corrected.p == pytest.approx(2 * own.p)
    assert load_grid("table2", "full").first == ("dealloc",)


def test_what_nobody_asked_beforehand_is_called_so(tmp_path):
    runs = write_errors(
        tmp_path, plain=(20.0, 22.0, 21.0), select=(21.0, 23.1, 22.2), shift=(19.0, 20.9, 19.8)
    )
    lines = build_table(group_runs(runs)[0]).findings
    assert [line.rpartition(": ")[2] for line in lines] == [
        "higher at the level of 0.05.",
        "lower at the level of 0.05.",
        *["not among the questions named beforehand."] * 2,
    ]
    assert f"{NAME} against plain, 3 seeds: test loss 1.0500 to 1.1050" in lines[2]
    assert f"{NAME} against +S, 3 seeds: test error 19.90 % to 22.10 %" in lines[3]


@pytest.mark.parametrize(
    "errors", [{"select": (20.0, 21.0)}, {"plain": (20.0,), "select": (19.0,)}]
)
def test_without_two_pairs_nothing_is_compared(tmp_path, errors):
    [group] = group_runs(write_errors(tmp_path, **errors))
    assert find_out(group) == []
    assert build_table(group).findings == ["There are no pairs to compare yet."]


@pytest.mark.parametrize(
    "other", [{"data": "fashion-mnist"}, {"subset": 90}, {"image_size": 4}, {"momentum": 0.8}]
)
def test_runs_with_different_data_or_training_are_kept_apart(tmp_path, other):
    write_run(tmp_path / "a", method="plain")
    write_run(tmp_path / "b", method="select", **other)
    groups = group_runs(collect([tmp_path]).runs)
    assert [len(group.rows) for group in groups] == [1, 1]
    assert len({group.title for group in groups}) == 2


def test_of_two_runs_with_the_same_settings_the_first_is_taken(tmp_path):
    for name, error in (("a", 20.0), ("b", 30.0)):
        write_run(tmp_path / name, method="plain", error=error, gamma=error / 100)  # not used
    for name, decay in (("c", 1e-5), ("d", 1e-2)):
        write_run(tmp_path / name, method="shift", shift_weight_decay=decay)
    [group] = group_runs(collect([tmp_path]).runs)
    assert [[run.name for run in row.unused] for row in group.rows] == [["b"], [], []]
    assert group.rows[0].measured("error") == {0: 20.0}


# The tests, against scipy and by hand

BEFORE = {0: 32.98, 1: 32.51, 2: 31.75, 3: 33.1}
AFTER = {0: 32.41, 1: 31.48, 2: 30.33, 7: 99.0}


def test_comparison_is_that_of_scipy_on_the_common_seeds():
    result = compare(BEFORE, AFTER)
    plain, other = [BEFORE[s] for s in range(3)], [AFTER[s] for s in range(3)]
    wanted = stats.ttest_rel(other, plain)
    interval = wanted.confidence_interval(0.95)
    base = sum(plain) / 3
    assert (result.seeds, result.before) == ((0, 1, 2), pytest.approx(base))
    assert result.after == pytest.approx(sum(other) / 3)
    assert result.p == pytest.approx(wanted.pvalue)
    assert result.change == pytest.approx(100 * (sum(other) / 3 / base - 1))
    assert result.low == pytest.approx(100 * interval.low / base)
    assert result.high == pytest.approx(100 * interval.high / base)


def test_equivalence_is_the_larger_of_two_one_sided_tests_of_scipy():
    for by in (0.7, 0.3, -0.2, -0.7):
        differences = [by + seed / 10 for seed in BEFORE]
        other = {seed: BEFORE[seed] + one for seed, one in zip(BEFORE, differences, strict=True)}
        ends = [
            stats.ttest_1samp(differences, -0.5, alternative="greater").pvalue,
            stats.ttest_1samp(differences, 0.5, alternative="less").pvalue,
        ]
        assert compare(BEFORE, other, 0.5).p_within == pytest.approx(max(ends))
    assert math.isnan(compare(BEFORE, other).p_within)


def test_too_few_common_seeds_are_no_comparison():
    assert compare({0: 1.0, 1: 2.0}, {1: 1.0, 2: 2.0}) is None


@pytest.mark.parametrize("change", [-0.1, 0.0, 0.7])
def test_equal_differences_are_no_proof(change):
    plain = {0: 20.1, 1: 22.3, 2: 21.7}
    result = compare(plain, {seed: error + change for seed, error in plain.items()}, 0.5)
    assert math.isnan(result.p)
    assert math.isnan(result.p_within)
    assert result.change == pytest.approx(100 * change * 3 / sum(plain.values()))


def test_holm_never_falls_and_never_passes_one():
    assert correct_holm({"a": 0.9, "b": 0.01, "c": 0.02, "d": 0.02}) == pytest.approx(
        {"a": 0.9, "b": 0.04, "c": 0.06, "d": 0.06}
    )
    assert correct_holm({"a": 0.6, "b": 0.7}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert correct_holm({}) == {}


def test_holm_counts_what_has_no_p_wherever_it_stands():
    for names in ("abc", "bac", "bca"):
        found = correct_holm({name: {"a": math.nan, "b": 0.01, "c": 0.04}[name] for name in names})
        assert math.isnan(found["a"])
        assert (found["b"], found["c"]) == pytest.approx((0.03, 0.08))


# What the cells of a table say.


SELECT_ROW = "+D+R zero+shift (select)"


def cells(table, method):
    [row] = [row for row in table.rows if row["method"].startswith(method)]
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, (plain, select) in enumerate([(20.0, 18.0), (22.0, 19.0), (21.0, 20.0)]):
        write_run(folder / f"p{seed}", method="plain", seed=seed, error=plain)
        write_run(folder / f"s{seed}", method="select", seed=seed, error=select)
    return folder


def test_mean_deviation_change_and_test(folder):
    grid = Grid("table1", "smoke", "", "", "A test.", ())
    [group] = group_runs(collect([folder]).runs, grid)
    table = build_table(group)
    plain, select = cells(table, "plain"), cells(table, SELECT_ROW)
    assert plain["test error %, last epoch"] == "21.00 ± 1.00"
    assert select["test error %, last epoch"] == "19.00 ± 1.00"
    assert select["best epoch"] == "19.00 ± 1.00"
    assert select["change"] == "-9.52 %"
    # By hand: differences -2, -3, -1; their mean over their standard error is -2 sqrt(3).
    assert select["p"] == "0.0742"
    assert select["95 % interval"] == "-21.35 to +2.31 %"
    assert not plain.keys() & {"change", "p"}
    for word in (
        "Scale: smoke.",
        "n = 3 seeds",
        "A test.",
        "quoted",
        f"{SELECT_ROW}: de-allocation",
    ):
        assert word in table.caption


def test_held_out_results_and_the_margin_are_columns_and_in_the_caption(tmp_path):
    for seed, error in enumerate((30.0, 31.0, 32.0)):
        write_run(tmp_path / f"p{seed}", method="plain", seed=seed, holdout=(error, 0.9))
        other = (error + seed / 10, 0.9 + seed / 10)
        write_run(tmp_path / f"s{seed}", method="select", seed=seed, holdout=other)
    grid = Grid("table1", "", "", "", "", (), margin=0.5)
    table = build_table(group_runs(collect([tmp_path]).runs, grid)[0])
    row = cells(table, SELECT_ROW)
    assert row["held-out error %"] == "31.10 ± 1.10"
    assert row["held-out loss"] == "1.0000 ± 0.1000"
    assert (row["change of loss"], row["p, loss"]) == ("+11.11 %", "0.2254")
    # Differences 0, 0.1, 0.2: mean and std 0.1, the bound 0.4 away; two degrees of freedom.
    assert row["p, no loss"] == "0.0101"
    assert "1,701 images that were not trained on" in table.caption
    assert "within 0.5 points" in table.caption


def test_ways_of_selecting_are_rows_of_one_table(tmp_path):
    write_run(tmp_path / "a", method="plain", gamma=0.5)  # which plain training does not use
    write_run(tmp_path / "b", method="select", gamma=0.3)
    write_run(tmp_path / "c", method="select", gamma=0.2)
    [group] = group_runs(collect([tmp_path]).runs)
    assert [row["method"] for row in build_table(group).rows] == [
        "plain",
        f"{SELECT_ROW} (gamma 0.2) [grace 1]",
        f"{SELECT_ROW} (gamma 0.3) [grace 1]",
    ]


def test_the_paper_s_figures_are_those_of_its_network_and_data():
    assert PAPER["table2"]["condensenet182"]["cifar10"]["dealloc"]["params"] == "3.24M"
    models = set(sc.list_models())
    assert all(set(table) <= models for table in PAPER.values())
    # Relative changes as printed, against the printed means: CIFAR-10 has two decimals.
    for model in PAPER["table1"].values():
        plain, select = (
            float(model["cifar10"][m]["error"].split("±")[0]) for m in ("plain", "select")
        )
        assert 100 * (select / plain - 1) == pytest.approx(
            float(model["cifar10"]["select"]["change"][:-1]), abs=0.02
        )


def test_table_2_shows_the_paper_s_sizes_and_its_count(tmp_path):
    settings = {"model": "densenet_bc190", "data": "cifar10", "image_size": 16}
    options = {"growth_rate": 4, "units": [1, 1, 1]}
    write_run(tmp_path / "p", method="plain", model_options=options, **settings)
    [group] = group_runs(collect([tmp_path]).runs, Grid("table2", "", "", "", "", ()))
    row = cells(build_table(group), "plain")
    assert (row["paper: params"], row["paper: FLOPs"]) == ("25.6M", "9,388M")
    own, counted = (float(row[name][:-1]) for name in ("MACs", "MACs, CondenseNet's count"))
    assert counted > own > 0


def test_missing_runs_have_a_row_with_the_reason_and_one_that_many_share_is_said_once(folder):
    settings = {**SETTINGS, "method": "slimming", "target_macs": 0.6}
    runs = tuple(PlannedRun(f"z{seed}", {**settings, "seed": seed}) for seed in range(4))
    grid = Grid("table1", "", "", "", "", runs)
    [group] = group_runs(collect([folder]).runs, grid, {"z0": "killed"})
    row = cells(build_table(group), "slimming [target_macs 0.6]")
    assert (row["n"], row["test error %, last epoch"]) == ("0", "no finished run")
    assert row["missing"] == "z0: killed; z1 to z3 (3 runs): not finished"


def test_markdown_and_csv_have_the_same_cells(folder):
    [group] = group_runs(collect([folder]).runs)
    table = build_table(group)
    # Nothing is missing, and the paper has no figures for these: no columns for that.
    assert not {"missing", "paper: change", "held-out loss", "p, no loss"} & set(table.header)
    lines = [line.strip("| ").split(" | ") for line in table.to_markdown().splitlines()]
    [*read] = csv.DictReader(io.StringIO(write_csv([table])))
    assert list(read[0]) == ["table", *HEADER]
    assert lines[2] == table.header
    for line, row in zip(lines[4:], read, strict=False):
        assert line == [row[name] for name in table.header]
    assert f"- {table.findings[0]}" in table.to_markdown()
