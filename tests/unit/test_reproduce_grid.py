"""The grids say what the issue and the paper say, and nothing of them stands in code."""

import pytest

from selectconv.reproduce.grid import SCALES, TABLES, load_grid

# Section 3 and supplement B: epochs of each pair, three seeds.
PAPER_EPOCHS = {
    "cifar10": 300,
    "cifar100": 300,
    "fashion-mnist": 300,
    "tiny-imagenet": 200,
    "imagenet": 120,
}
ABLATIONS = ("plain", "dealloc", "zero", "random", "shift", "select")


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_grid_loads_and_names_its_test(table, scale):
    grid = load_grid(table, scale)
    assert (grid.table, grid.scale) == (table, scale)
    assert "paired" in grid.test
    assert len({run.name for run in grid.runs}) == len(grid.runs) > 0
    seeds = [run.settings["seed"] for run in grid.runs]
    assert seeds == sorted(seeds)  # seed by seed: what is finished early can be compared


@pytest.mark.parametrize(
    ("table", "count"), [("table1", 96), ("table2", 18), ("table3", 12), ("ablation", 18)]
)
def test_the_full_scale_is_the_paper(table, count):
    grid = load_grid(table, "full")
    assert len(grid.runs) == count
    assert {run.settings["seed"] for run in grid.runs} == {0, 1, 2}
    for run in grid.runs:
        assert set(run.settings) == {"model", "data", "method", "seed"}  # all else: the defaults
        if run.problem is not None:
            continue
        wanted = 600 if run.config.model == "condensenet182" else PAPER_EPOCHS[run.config.data]
        assert run.config.epochs == wanted
        assert run.config.gamma == (0.0005 if run.config.model == "densenet121" else 0.001)
        assert (run.config.subset, run.config.image_size, run.config.grace) == (None, None, 0)


@pytest.mark.parametrize("data", ["cifar10", "fashion-mnist"])
def test_the_reduced_ablation_has_the_promised_seeds(data):
    runs = [run for run in load_grid("ablation", "reduced").runs if run.config.data == data]
    seeds = {m: {run.config.seed for run in runs if run.config.method == m} for m in ABLATIONS}
    assert len(seeds["plain"]) >= 10
    assert seeds["plain"] == seeds["select"]
    for method in ABLATIONS:
        assert len(seeds[method]) >= 5
        assert seeds[method] <= seeds["plain"]  # so that every pair can be formed
        assert max(seeds[method]) < 100  # from 100 on: the seeds that chose the protocol
    common = [{**run.config.to_dict(), "method": "", "seed": 0} for run in runs]
    assert all(config == common[0] for config in common)


def test_the_reduced_table_1_compares_placements_and_nothing_else():
    runs = load_grid("table1", "reduced").runs
    elsewhere = [run for run in runs if "placement" in run.config.model_options]
    others = [run for run in runs if run not in elsewhere]
    seeds = {run.config.seed for run in elsewhere}
    assert len(seeds) >= 4
    for method in ("plain", "select", "shift"):
        assert seeds <= {run.config.seed for run in others if run.config.method == method}
    common = [{**run.config.to_dict(), "method": "", "seed": 0} for run in others]
    for run in elsewhere:
        options = dict(run.config.model_options)
        assert run.config.method == "select"
        assert options.pop("placement") == "before-norm"
        common.append({**run.config.to_dict(), "method": "", "seed": 0, "model_options": options})
    assert all(config == common[0] for config in common)


def test_an_unknown_table_or_scale_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'table1'"):
        load_grid("tabel1", "full")
    with pytest.raises(ValueError, match="got 'big'"):
        load_grid("table1", "big")
