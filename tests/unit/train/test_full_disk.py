"""What a run writes, where the disk is full: an error of ours, and what was there before stays."""

import contextlib
import resource

import pytest
import torch

from selectconv.errors import RunError
from selectconv.lab.train.loop import add_events
from selectconv.lab.train.network import dump_checkpoint, load_checkpoint
from selectconv.lab.train.run_folder import CHECKPOINT, RunFolder


@contextlib.contextmanager
def files_of_at_most(size):
    """Let every write beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state(epoch):
    nothing = dict.fromkeys(("optimizer", "allocator", "best_error"))
    return dump_checkpoint({"epoch": epoch, "model": {"weight": torch.ones(3000)}, **nothing})


@pytest.mark.parametrize("size", [0, 64, 1000, 8192, 12_000])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(size, tmp_path):
    folder = RunFolder(tmp_path)
    folder.write({CHECKPOINT: state(0)})
    with files_of_at_most(size), pytest.raises(RunError, match=r"cannot be written: "):
        folder.write({CHECKPOINT: state(1)})
    assert load_checkpoint(folder)["epoch"] == 0


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_events_of_a_run_that_was_resumed(tmp_path):
    for epoch in range(3):
        add_events(tmp_path / "events.out.tfevents.1", {"epoch": epoch, "loss": 2.0, "error": None})
    add_events(tmp_path / "events.out.tfevents.2", {"epoch": 1, "loss": 7.0, "error": 0.5})
    assert read_events(tmp_path / "events.out.tfevents.1")["loss"] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    found = read_events(tmp_path)
    assert (found["loss"], found["error"]) == ([(0, 2.0), (1, 7.0)], [(1, 0.5)])


@pytest.mark.parametrize("size", [0, 30])
def test_events_that_do_not_fit_are_one_error(size, tmp_path, capfd):
    with files_of_at_most(size), pytest.raises(RunError, match=r"tfevents.*cannot be written: "):
        add_events(tmp_path / "tensorboard" / "events.out.tfevents.1", {"epoch": 0, "loss": 1.0})
    assert "Traceback" not in capfd.readouterr().err
