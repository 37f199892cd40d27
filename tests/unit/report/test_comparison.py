"""The figures that set methods side by side, drawn from runs whose figures are known."""

import pytest

from fake_runs import write_run
from selectconv.lab.report.compare.groups import group_runs
from selectconv.lab.report.figures.comparison import draw_cost, draw_pairs, draw_times
from selectconv.lab.report.runs.collect import collect

pytest.importorskip("matplotlib", reason="figures need matplotlib (the train extra)")


def group_of(tmp_path, *rows):
    for method, seed, error in rows:
        write_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, error=error)
    (group,) = group_runs(collect([tmp_path]).runs)
    return group


def test_pairs_are_of_the_same_seed(tmp_path):
    group = group_of(
        tmp_path, ("plain", 0, 20.0), ("plain", 1, 22.0), ("select", 0, 19.0), ("select", 2, 5.0)
    )
    figure = draw_pairs(group, "g")
    name = group.find("select").short_name
    assert f"{name} 1." in figure.caption  # seed 2 has no plain run
    assert "minus that of" in figure.body


def test_without_a_baseline_nothing_is_paired(tmp_path):
    assert draw_pairs(group_of(tmp_path, ("select", 0, 20.0)), "g") is None


def test_cost_and_time_show_every_method(tmp_path):
    group = group_of(tmp_path, ("plain", 0, 20.0), ("dealloc", 0, 21.0), ("dealloc", 1, 23.0))
    for draw in (draw_cost, draw_times):
        figure = draw(group, "g")
        assert len(group.rows) == 2
        for row in group.rows.values():
            assert f"{row.short_name} ({len(row.runs)})" in figure.body
