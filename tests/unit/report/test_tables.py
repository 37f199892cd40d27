"""Which runs stand in one table, and what its cells say."""

import json
import math

import pytest
import torch
from markupsafe import escape
from safetensors.torch import load_file

import selectconv as sc
from fake_runs import SETTINGS, seal, write_run
from selectconv.deploy.cost import count_macs, count_params
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.report.compare.groups import find_duplicates, group_runs
from selectconv.lab.report.compare.tables import HEADER, build_table, paper_figures
from selectconv.lab.report.runs.collect import collect, read_run
from selectconv.lab.report.runs.replay import CLOSED, MOVED, OWN, replay
from selectconv.lab.report.runs.size import measure_size
from selectconv.lab.reproduce.grid import load_grid
from selectconv.lab.train.config import resolve
from selectconv.lab.train.network import build_model


def cells(table, method):
    [row] = [row for row in table.rows if row[0].startswith(method)]
    return dict(zip(HEADER, row, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, (plain, select) in enumerate([(20.0, 18.0), (22.0, 19.0), (21.0, 20.0)]):
        write_run(folder / f"p{seed}", method="plain", seed=seed, error=plain)
        write_run(folder / f"s{seed}", method="select", seed=seed, error=select)
    return folder


def test_mean_deviation_change_and_test(folder):
    [group] = group_runs(collect([folder]).runs)
    table = build_table(group, scale="smoke", test="A test.")
    plain, select = cells(table, "plain"), cells(table, "+D+R zero+shift")
    assert plain["test error %, last epoch"] == "21.00 ± 1.00"
    assert select["test error %, last epoch"] == "19.00 ± 1.00"
    assert select["change"] == "-9.52 %"
    # By hand: differences -2, -3, -1; their mean over their standard error is -2 sqrt(3).
    assert select["p"] == "0.0742"
    assert select["95 % interval"] == "-21.35 to +2.31 %"
    assert (plain["change"], plain["p"]) == ("", "")
    for word in ("Scale: smoke.", "n = 3 seeds", "A test.", "quoted"):
        assert word in table.caption


@pytest.mark.parametrize(
    "other", [{"data": "fashion-mnist"}, {"subset": 90}, {"image_size": 4}, {"epochs": 5}]
)
def test_runs_with_different_data_or_training_are_kept_apart(tmp_path, other):
    write_run(tmp_path / "a", method="plain")
    write_run(tmp_path / "b", method="select", **other)
    groups = group_runs(collect([tmp_path]).runs)
    assert len(groups) == 2
    assert all(len(group.rows) == 1 for group in groups)


def test_ways_of_selecting_are_rows_of_one_table(tmp_path):
    write_run(tmp_path / "a", method="plain", gamma=0.5)  # which plain training does not use
    write_run(tmp_path / "b", method="select", gamma=0.3)
    write_run(tmp_path / "c", method="select", gamma=0.2)
    [group] = group_runs(collect([tmp_path]).runs)
    names = [row[0] for row in build_table(group).rows]
    assert names == [
        "plain",
        "+D+R zero+shift (select) (gamma 0.2) [grace 1]",
        "+D+R zero+shift (select) (gamma 0.3) [grace 1]",
    ]


def test_second_questions_are_corrected(tmp_path):
    errors = {
        "plain": (20.0, 22.0),
        "zero": (19.0, 20.5),
        "random": (19.0, 20.8),
        "select": (19.0, 20.5),
    }
    for method, values in errors.items():
        for seed, error in enumerate(values):
            write_run(tmp_path / f"{method}{seed}", method=method, seed=seed, error=error)
    [group] = group_runs(collect([tmp_path]).runs)
    table = build_table(group)
    # With one degree of freedom p is 2 atan(1 / t) / pi; t is 5 for zero and select, 11 for random.
    five, eleven = (2 * math.atan(1 / t) / math.pi for t in (5, 11))
    assert cells(table, "+D+R zero+shift")["p"] == f"{five:.4f}"
    assert cells(table, "+D+R random")["p"] == f"{2 * eleven:.4f}"
    assert cells(table, "+D+R zero [")["p"] == f"{five:.4f}"
    assert "Holm" in table.caption


def test_the_paper_s_figures_are_those_of_its_network_and_data():
    quoted = paper_figures()
    assert quoted["table1"]["densenet40"]["cifar10"]["select"] == {
        "error": "6.09±0.10",
        "change": "-8.01%",
    }
    assert quoted["table2"]["condensenet182"]["cifar10"]["dealloc"]["params"] == "3.24M"
    models = set(sc.list_models())
    for table in quoted.values():
        assert set(table) <= models
    # Relative changes as printed, against the printed means: CIFAR-10 has two decimals.
    for model in quoted["table1"].values():
        plain, select = (
            float(model["cifar10"][m]["error"].split("±")[0]) for m in ("plain", "select")
        )
        assert 100 * (select / plain - 1) == pytest.approx(
            float(model["cifar10"]["select"]["change"][:-1]), abs=0.02
        )


def test_missing_runs_have_a_row_with_the_reason(folder):
    planned = {**SETTINGS, "method": "zero", "seed": 0}
    [group] = group_runs(collect([folder]).runs, [("z0", planned, "no disk left")])
    row = cells(build_table(group), "+D+R zero [")
    assert (row["n"], row["missing"]) == ("0", "z0: no disk left")
    assert row["test error %, last epoch"] == "no finished run"


def test_a_reason_that_many_runs_share_is_said_once(folder):
    reasons = ["killed", "not finished", "not finished", "not finished"]
    missing = [
        (f"z{seed}", {**SETTINGS, "method": "zero", "seed": seed}, reason)
        for seed, reason in enumerate(reasons)
    ]
    [group] = group_runs(collect([folder]).runs, missing)
    said = cells(build_table(group), "+D+R zero [")["missing"]
    assert said == "z0: killed; z1 to z3 (3 runs): not finished"


def test_markdown_csv_and_html_have_the_same_cells(folder):
    [group] = group_runs(collect([folder]).runs)
    table = build_table(group)
    markdown, html = table.to_markdown(), table.to_html()
    # Nothing is missing, and the paper has no figures for these: no columns for that.
    empty = {"missing", "MACs, CondenseNet's count"}
    empty |= {"paper: change", "paper: params", "paper: FLOPs"}
    empty |= {"held-out loss", "change of loss", "p, loss", "held-out error %", "p, no loss"}
    for name in HEADER:
        assert (f" {name} |" in markdown) is (name not in empty)
        assert (f'<th scope="col">{escape(name)}</th>' in html) is (name not in empty)
    for row in table.rows:
        shown = [cell for name, cell in zip(HEADER, row, strict=True) if name not in empty]
        assert "| " + " | ".join(shown) + " |" in markdown
        assert all(f"<td>{cell}</td>" in html for cell in shown)


def test_replay_ends_where_the_network_ended(tmp_path):
    run = read_run(write_run(tmp_path / "a", method="select", weights=True))
    state = load_file(run.weights)
    layers = replay(run)
    assert sum(layer.states[-1].count(MOVED) for layer in layers) == run.metrics[-1]["moved"] > 0
    assert sum(layer.states[-1].count(CLOSED) for layer in layers) == run.metrics[-1]["closed"] > 0
    for layer in layers:
        assert layer.source == state[f"{layer.name}.index"].tolist()
        for slot, last in enumerate(layer.states[-1]):
            is_open = bool(state[f"{layer.name}.gate"][slot])
            is_moved = bool(state[f"{layer.name}.moved"][slot])
            assert last == (CLOSED if not is_open else MOVED if is_moved else OWN)


def test_a_log_of_another_network_is_refused(tmp_path):
    path = write_run(tmp_path / "a", method="select")
    row = {"epoch": 0, "layers": {"head.conv": {"closed": [1], "opened": []}}}
    (path / "allocation.jsonl").write_text(json.dumps(row) + "\n")
    seal(path)
    with pytest.raises(ValueError, match=r"has no layer 'head.conv'"):
        replay(read_run(path))


def test_closed_slots_do_not_count(tmp_path):
    plain = build_model(resolve({**SETTINGS, "method": "plain"}), dataset_info("digits"))
    whole = count_params(plain), count_macs(plain, (1, 8, 8))
    size = measure_size(read_run(write_run(tmp_path / "p", method="plain")))
    assert (size.params, size.macs) == whole
    run = read_run(write_run(tmp_path / "d", method="dealloc", gamma=0.3))
    model = build_model(run.config, dataset_info("digits"))
    for layer in replay(run):
        closed = [slot for slot, state in enumerate(layer.states[-1]) if state == CLOSED]
        model.get_submodule(layer.name).close(closed)
    small = sc.compress(model.eval(), torch.zeros(1, 1, 8, 8))
    size = measure_size(run)
    assert size.params == count_params(small) < whole[0]
    assert size.macs == count_macs(small, (1, 8, 8)) < whole[1]


def test_findings_say_what_the_runs_show(folder, tmp_path):
    [group] = group_runs(collect([folder]).runs)
    finding, loss = build_table(group).findings
    assert "plain, 3 seeds: test loss 1.0500 to 0.9500, a change of -9.52 %" in loss
    assert loss.startswith("Not among the questions named beforehand: +D+R zero+shift (select)")
    assert "against plain, 3 seeds: test error 21.00 % to 19.00 %" in finding
    assert finding.endswith("p = 0.0742: no difference found at the level of 0.05.")
    for seed, error in enumerate((20.0, 22.0, 21.0)):
        write_run(tmp_path / f"p{seed}", method="plain", seed=seed, error=error)
        write_run(tmp_path / f"s{seed}", method="select", seed=seed, error=error + 1 + seed / 10)
        write_run(tmp_path / f"h{seed}", method="shift", seed=seed, error=error - 1 - seed / 10)
    [group] = group_runs(collect([tmp_path]).runs)
    first, second, _, third = build_table(group).findings
    assert first.endswith(": higher at the level of 0.05.")
    assert second.startswith("+S against plain")
    assert second.endswith(": lower at the level of 0.05.")
    assert third.startswith(
        "Not among the questions named beforehand: +D+R zero+shift (select) against +S"
    )


def test_while_planned_runs_are_missing_nothing_is_decided(tmp_path):
    for seed, error in enumerate((20.0, 22.0, 21.0)):
        write_run(tmp_path / f"p{seed}", method="plain", seed=seed, error=error)
        write_run(tmp_path / f"s{seed}", method="select", seed=seed, error=error - 1 - seed / 10)
    runs = collect([tmp_path]).runs
    finding, _ = build_table(group_runs(runs)[0]).findings
    assert finding.endswith(": lower at the level of 0.05.")
    planned = runs[-1].config.to_dict() | {"method": "select", "seed": 3}
    [group] = group_runs(runs, [("s3", planned, "not finished")])
    finding, _ = build_table(group).findings
    assert finding.endswith(": preliminary, 1 planned runs are missing.")


def test_without_a_baseline_nothing_is_compared(tmp_path):
    write_run(tmp_path / "s", method="select")
    [group] = group_runs(collect([tmp_path]).runs)
    assert build_table(group).findings == [
        "There is no finished run of the baseline: nothing can be compared."
    ]


def pairs(folder, **errors):
    for method, values in errors.items():
        for seed, error in enumerate(values):
            write_run(folder / f"{method}{seed}", method=method, seed=seed, error=error)
    return collect([folder]).runs


def test_questions_without_an_answer_yet_count(tmp_path):
    runs = pairs(tmp_path, plain=(20.0, 22.0, 21.0), dealloc=(19.0, 20.9, 19.8))
    settings = runs[0].config.to_dict()
    alone = cells(build_table(group_runs(runs)[0]), "+D")
    missing = [
        (f"{method}{seed}", {**settings, "method": method, "seed": seed}, "no disk left")
        for method in ("zero", "random", "shift")
        for seed in range(3)
    ]
    table = build_table(group_runs(runs, missing)[0])
    assert float(cells(table, "+D [")["p"]) == pytest.approx(4 * float(alone["p"]), abs=3e-4)
    [finding] = [line for line in table.findings if line.startswith("+D against")]
    assert finding.endswith("after Holm's correction: preliminary, 9 planned runs are missing.")


def test_the_first_question_is_the_grid_s(tmp_path):
    runs = pairs(
        tmp_path, plain=(20.0, 22.0, 21.0), dealloc=(19.0, 20.9, 19.8), zero=(19.0, 20.9, 19.8)
    )
    both = build_table(group_runs(runs)[0])
    own = build_table(group_runs(runs, first=("dealloc",))[0])
    corrected, alone = (float(cells(table, "+D [")["p"]) for table in (both, own))
    assert corrected == pytest.approx(2 * alone, abs=2e-4)
    assert own.findings[0].startswith("+D against plain")
    assert "Holm" not in own.caption
    assert load_grid("table2", "full").first == ("dealloc",)


def test_a_missing_run_stands_in_the_row_of_its_method(tmp_path):
    settings = {**SETTINGS, "method": "slimming", "target_macs": 0.6}
    write_run(tmp_path / "p", method="plain")
    runs = collect([tmp_path]).runs
    missing = [(f"s{seed}", {**settings, "seed": seed}, "killed") for seed in range(2)]
    [group] = group_runs(runs, missing)
    assert [(row[0], row[-1]) for row in build_table(group).rows] == [
        ("plain", ""),
        ("slimming [target_macs 0.6]", "s0, s1: killed"),
    ]


def test_groups_that_differ_in_a_setting_have_titles_that_say_so(tmp_path):
    write_run(tmp_path / "a", method="plain", momentum=0.8)
    write_run(tmp_path / "b", method="plain", momentum=0.9)
    titles = [group.title for group in group_runs(collect([tmp_path]).runs)]
    assert [title.partition(", 6 epochs")[2] for title in titles] == [
        ", momentum 0.8",
        ", momentum 0.9",
    ]


def test_a_second_run_with_the_same_settings_is_named(tmp_path):
    write_run(tmp_path / "a", method="plain", error=20.0)
    write_run(tmp_path / "b", method="plain", error=30.0)
    runs = collect([tmp_path]).runs
    [line] = find_duplicates(runs)
    assert line.startswith(f"{tmp_path / 'b'}: not in a table, because {tmp_path / 'a'} has")
    [group] = group_runs(runs)
    assert cells(build_table(group), "plain")["test error %, last epoch"] == "20.00"
    write_run(tmp_path / "c", method="shift", shift_weight_decay=1e-5)
    write_run(tmp_path / "d", method="shift", shift_weight_decay=1e-2)
    assert len(find_duplicates(collect([tmp_path]).runs)) == 1


def test_table_2_shows_the_paper_s_sizes_and_its_count(tmp_path):
    settings = {"model": "densenet_bc190", "data": "cifar10", "image_size": 16}
    options = {"growth_rate": 4, "units": [1, 1, 1]}
    write_run(tmp_path / "p", method="plain", model_options=options, **settings)
    [group] = group_runs(collect([tmp_path]).runs)
    row = cells(build_table(group, table="table2"), "plain")
    assert (row["paper: params"], row["paper: FLOPs"]) == ("25.6M", "9,388M")
    own, counted = (float(row[name][:-1]) for name in ("MACs", "MACs, CondenseNet's count"))
    assert counted > own > 0
