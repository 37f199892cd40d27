"""The grids say what the issue and the paper say, and nothing of them stands in code."""

import pytest

from selectconv.lab.data import dataset_info
from selectconv.lab.reproduce.grid import SCALES, TABLES, load_grid
from selectconv.lab.train.network import build_model

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
    # Stage by stage, and there seed by seed: what is finished early can be compared.
    order = [(run.stage, run.settings["seed"]) for run in grid.runs]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("table", "count"), [("table1", 96), ("table2", 18), ("table3", 12), ("ablation", 18)]
)
def test_the_full_scale_is_the_paper(table, count):
    grid = load_grid(table, "full")
    assert len(grid.runs) == count
    assert {run.settings["seed"] for run in grid.runs} == {0, 1, 2}
    for run in grid.runs:
        assert set(run.settings) == {"model", "data", "method", "seed"}  # all else: the defaults
        wanted = 600 if run.config.model == "condensenet182" else PAPER_EPOCHS[run.config.data]
        assert run.config.epochs == wanted
        assert run.config.gamma == (0.0005 if run.config.model == "densenet121" else 0.001)
        assert (run.config.subset, run.config.image_size, run.config.grace) == (None, None, 0)


def seeds_by(runs, key):
    found = {}
    for run in runs:
        found.setdefault(key(run), set()).add(run.config.seed)
    return found


def test_the_reduced_ablation_has_the_promised_seeds():
    runs = load_grid("ablation", "reduced").runs
    assert all(run.config.holdout for run in runs)
    shared = [run for run in runs if run.config.weight_decay == 0.001]
    seeds = seeds_by(shared, lambda run: run.config.method)
    assert seeds["plain"] == seeds["select"] == set(range(20, 30))
    for method in ABLATIONS:
        assert len(seeds[method]) >= 6
        assert seeds[method] <= seeds["plain"]  # so that every pair can be formed
    free = {"method": "", "seed": 0}
    common = [{**run.config.to_dict(), **free} for run in shared]
    assert all(config == common[0] for config in common)
    others = [run for run in runs if run not in shared]
    assert {run.config.method for run in others} == {"plain"}
    assert {run.config.seed for run in others} == seeds["plain"]
    assert runs[0].stage < others[0].stage  # the first question first


@pytest.mark.parametrize(
    ("model", "data", "images", "epochs", "count"),
    [
        ("densenet40", "fashion-mnist", 10_000, 40, 10),
        ("densenet40", "cifar10", 40_000, 10, 6),
        ("selectconv.lab.reproduce.networks:small_mobilenet", "cifar10", 10_000, 40, 6),
    ],
)
def test_the_reduced_table_1_has_the_promised_settings(model, data, images, epochs, count):
    runs = [
        run
        for run in load_grid("table1", "reduced").runs
        if (run.config.model, run.config.data, run.config.subset) == (model, data, images)
        and not run.contest
    ]
    assert all(run.config.holdout and run.config.epochs == epochs for run in runs)
    seeds = seeds_by(runs, lambda run: run.config.method)
    assert seeds == {key: set(range(20, 20 + count)) for key in ("plain", "select")}


def test_the_reduced_table_2_sets_the_same_cost_for_every_method():
    grid = load_grid("table2", "reduced")
    assert grid.margin == 0.5
    runs = [run for run in grid.runs if run.stage < 2]  # then comes the fair one
    dense = [run for run in runs if run.config.model == "densenet40"]
    seeds = seeds_by(dense, lambda run: (run.config.method, run.config.bn_sparsity == 0))
    assert len(seeds) == 5
    assert all(len(own) == 6 for own in seeds.values())
    assert {run.config.target_macs for run in dense} == {None, 0.5}
    condense = [run for run in runs if run.config.model == "condensenet182"]
    assert set(seeds_by(condense, lambda run: run.config.method)) == {"plain", "lgc", "dealloc"}


@pytest.mark.parametrize(
    ("table", "contest", "num_arms", "seeds"),
    [
        ("table1", "equal-cost", 6, 10),
        ("table1", "equal-cost-fashion", 2, 10),
        ("table1", "equal-cost-more-images", 2, 10),
        ("table1", "harm-densenet121", 2, 10),
        ("table1", "harm-mobilenet", 2, 10),
        ("table1", "harm-resnet50", 2, 10),
        ("table2", "spare", 7, 10),
        ("table2", "resnet20", 5, 3),
    ],
)
def test_contests_have_the_same_seeds_for_all_arms(table, contest, num_arms, seeds):
    grid = load_grid(table, "reduced")
    runs = [run for run in grid.runs if run.contest == contest]
    arms = seeds_by(runs, lambda run: run.arm)
    assert len(arms) == num_arms
    assert all(own == set(range(30, 30 + seeds)) for own in arms.values())
    asked = [question[key] for question in grid.contests[contest]["questions"]
             for key in ("arm", "against")]  # fmt: skip
    assert set(asked) <= set(arms)
    for run in {run.arm: run for run in runs}.values():  # each network can be built
        build_model(run.config, dataset_info(run.config.data, run.config.image_size))


def test_the_fair_table_2_is_that_of_the_protocol():
    runs = [run for run in load_grid("table2", "reduced").runs if run.stage == 2]
    arms = seeds_by(
        runs,
        lambda run: (
            run.config.method, run.config.model_options["growth_rate"], run.config.epochs,
            run.config.target_macs, run.config.bn_sparsity,
        ),
    )  # fmt: skip
    by_gamma = (None, 1e-5)
    assert arms.keys() == {
        ("plain", 6, 60, *by_gamma), ("dealloc", 6, 60, *by_gamma), ("plain", 4, 60, *by_gamma),
        ("plain", 4, 120, *by_gamma), ("plain", 5, 60, *by_gamma),
        ("slimming", 6, 60, 0.48, 0.0), ("slimming", 6, 60, 0.48, 1e-4),
    }  # fmt: skip
    assert all(seeds == set(range(30, 40)) for seeds in arms.values())
    assert all(run.config.gamma == 0.02 for run in runs if run.config.method == "dealloc")
