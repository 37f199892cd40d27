"""What a run writes, where the disk is full: an error of ours, and what was there before stays."""

import contextlib
import resource
import time
from pathlib import Path

import pytest
import torch

from selectconv.errors import RunError
from selectconv.lab.train.checkpoint import dump_checkpoint, load_checkpoint
from selectconv.lab.train.event_file import EventFile
from selectconv.lab.train.manifest import CHECKPOINT
from selectconv.lab.train.run_folder import RunFolder


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


def test_tensorboard_reads_the_events_of_a_run_that_was_resumed(tmp_path, monkeypatch):
    first = EventFile(tmp_path, first_epoch=0)
    for epoch in range(3):
        first.add({"loss": float(epoch), "test_error": None}, epoch)
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    again = EventFile(tmp_path, first_epoch=2)
    again.add({"loss": 7.0, "test_error": 0.5}, 2)
    assert read_events(first.path)["loss"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert read_events(tmp_path) == {
        "loss": [(0, 0.0), (1, 1.0), (2, 7.0)],
        "test_error": [(2, 0.5)],
    }


@pytest.mark.parametrize("size", [0, 30])
def test_events_that_do_not_fit_are_one_error(size, tmp_path, capfd):
    with files_of_at_most(size), pytest.raises(RunError, match=r"tfevents.*cannot be written: "):
        EventFile(tmp_path, first_epoch=0)
    events = EventFile(tmp_path, first_epoch=0)
    with files_of_at_most(Path(events.path).stat().st_size), pytest.raises(RunError):
        events.add({"loss": 1.0}, 0)
    assert "Traceback" not in capfd.readouterr().err
