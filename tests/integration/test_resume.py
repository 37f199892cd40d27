"""A run that was killed at any moment and resumed ends with the bits of an undisturbed one."""

import signal

import pytest
import torch
from safetensors.torch import load_file

import selectconv as sc
from forked import Forked
from selectconv.lab.train.network import load_checkpoint
from selectconv.lab.train.run_folder import ALLOCATION, BEST, LAST, METRICS, RunFolder
from tiny_models import allocation_of, assert_same

# What a clock says differs between any two runs; everything else must not.
CLOCKS = ("seconds", "images_per_second")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Forked(tmp_path_factory.mktemp("said")).run


def metrics_of(folder):
    rows = RunFolder(folder).read(METRICS)
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def assert_same_run(left, right):
    assert_same(load_checkpoint(RunFolder(left)), load_checkpoint(RunFolder(right)))
    assert metrics_of(left) == metrics_of(right)
    for name in (ALLOCATION, LAST, BEST):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = run(out)
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(out)) == 4
    assert len(RunFolder(out).read(ALLOCATION)) >= 2, "the test needs slots that move"
    return out


@pytest.mark.parametrize(
    "moment",
    [
        ("step", "2"),  # before the first checkpoint
        ("step", "8"),  # in the middle of the third epoch
        ("manifest.json", "3"),  # before the files of the first epoch
        ("metrics.jsonl", "1"),  # right after their manifest
        ("last.safetensors", "2"),  # a line is there that the checkpoint does not know
        ("last.ckpt", "1"),
        ("previous.ckpt", "2"),
        ("last.ckpt", "4"),
    ],
    ids=" ".join,
)
def test_killed_and_resumed_ends_with_the_same_bits(moment, run, undisturbed, tmp_path):
    out = tmp_path / "run"
    killed = run(out, "--die", *moment)
    assert killed.returncode == -signal.SIGKILL
    assert RunFolder(out).status() == "running"
    resumed = run(out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert RunFolder(out).status() == "done"
    assert_same_run(out, undisturbed)


def test_same_seed_same_bits_other_seed_other_bits(run, undisturbed, tmp_path):
    assert run(tmp_path / "same").returncode == 0
    assert_same_run(tmp_path / "same", undisturbed)
    assert run(tmp_path / "other", "--seed", "1").returncode == 0
    assert (tmp_path / "other" / LAST).read_bytes() != (undisturbed / LAST).read_bytes()


def test_a_runs_log_replays_onto_a_fresh_model(undisturbed):
    model = sc.create_model(
        "densenet40", growth_rate=4, units=(1, 1, 1), in_channels=1, selective=True
    )
    reports = sc.ChannelAllocator(model, total_epochs=4).replay(undisturbed / ALLOCATION)
    assert len(reports) >= 2
    assert any(report.reallocated for report in reports)
    saved = load_file(undisturbed / LAST)
    for name, buffer in allocation_of(model).items():
        assert torch.equal(buffer, saved[name]), name
