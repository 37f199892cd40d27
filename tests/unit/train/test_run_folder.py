"""A run's folder: whole files, honest readers."""

import contextlib
import os
import resource
from contextlib import contextmanager

import pytest
import torch

from selectconv.errors import RunError, UsageError
from selectconv.lab.train import run_folder
from selectconv.lab.train.loop import add_events
from selectconv.lab.train.network import (
    dump_checkpoint,
    dump_weights,
    load_checkpoint,
    load_weights,
)
from selectconv.lab.train.run_folder import (
    ALLOCATION,
    CHECKPOINT,
    LAST,
    MANIFEST,
    METRICS,
    PREVIOUS,
    RunFolder,
    dump_lines,
)

STATE = {"epoch": 3, "model": {}, "optimizer": {}, "allocator": None, "best_error": 1.5}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def lines(*epochs):
    return dump_lines([{"epoch": epoch, "loss": 0.25} for epoch in epochs])


def write_epoch(folder, epoch):
    """Write a smaller version of what the loop writes."""
    contents = {METRICS: lines(*range(epoch + 1)), ALLOCATION: lines(epoch)}
    contents[LAST] = b"weights %d" % epoch
    if (folder / CHECKPOINT).exists():
        contents[PREVIOUS] = (folder / CHECKPOINT).read_bytes()
    folder.write({**contents, CHECKPOINT: dump_checkpoint({**STATE, "epoch": epoch})})


@contextmanager
def dying(monkeypatch, name):
    """Let the process die before a file is renamed into its place."""
    replace = os.replace

    def replace_or_die(source, target):
        if os.path.basename(target) == name:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_die)
        yield


def test_epochs_come_back_and_the_lines_after_a_checkpoint_are_cut(folder):
    for epoch in range(3):
        write_epoch(folder, epoch)
    assert [row["epoch"] for row in folder.read(METRICS)] == [0, 1, 2]
    assert [row["epoch"] for row in folder.read(ALLOCATION)] == [2]
    assert load_checkpoint(folder) == {"format": 1, **STATE, "epoch": 2}
    folder.cut_after(1)
    assert (folder / METRICS).read_bytes() == lines(0, 1)
    assert folder.read(ALLOCATION) == []
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_lines([{"epoch": float("nan")}])


@pytest.mark.parametrize("name", [MANIFEST, METRICS, LAST, PREVIOUS, CHECKPOINT])
def test_an_epoch_that_is_cut_short_time_and_again_leaves_what_can_be_read(
    folder, name, monkeypatch
):
    for epoch in range(2):
        write_epoch(folder, epoch)
    for _ in range(3):
        with dying(monkeypatch, name), pytest.raises(KeyboardInterrupt):
            write_epoch(folder, 2)
        assert load_checkpoint(folder)["epoch"] == 1
        assert folder.check(LAST).read_bytes() in (b"weights 1", b"weights 2")
        assert folder.check(PREVIOUS).exists()
        folder.cut_after(1)  # as a resumed run does
        assert (folder / METRICS).read_bytes() == lines(0, 1)
    write_epoch(folder, 2)
    assert load_checkpoint(folder)["epoch"] == 2


@pytest.mark.parametrize("name", [METRICS, ALLOCATION, LAST, CHECKPOINT])
def test_files_of_another_epoch_than_the_checkpoints_are_refused(folder, name):
    write_epoch(folder, 0)
    before = (folder / name).read_bytes()
    write_epoch(folder, 1)
    whole = (folder / name).read_bytes()
    damages = [before[:-1], whole[:-1], whole + b"\n", whole.replace(b"1", b"3", 1), b"", None]
    for damaged in [before] * (name != CHECKPOINT) + damages:
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        with pytest.raises(RunError, match=f"{name} is damaged"):
            folder.check(name)


def test_the_checkpoint_before_is_offered_and_accepted_in_its_place(folder, monkeypatch):
    for epoch in range(2):
        write_epoch(folder, epoch)
    (folder / CHECKPOINT).unlink()
    with pytest.raises(RunError, match=rf"{CHECKPOINT} is damaged.*rename it to {CHECKPOINT}"):
        folder.check(CHECKPOINT)
    os.replace(folder / PREVIOUS, folder / CHECKPOINT)
    assert load_checkpoint(folder)["epoch"] == 0
    folder.cut_after(0)
    with dying(monkeypatch, CHECKPOINT), pytest.raises(KeyboardInterrupt):
        write_epoch(folder, 1)
    assert load_checkpoint(folder)["epoch"] == 0


@pytest.mark.parametrize("bit", range(0, 8 * 400, 37))
def test_one_wrong_bit_in_the_manifest_is_noticed_or_changes_nothing(folder, bit):
    folder.write({"config.yaml": b"gamma: 0.05\n"})
    content = bytearray((folder / MANIFEST).read_bytes())
    bit %= 8 * len(content)
    content[bit // 8] ^= 1 << bit % 8
    (folder / MANIFEST).write_bytes(content)
    (folder / "config.yaml").write_text("gamma: 0.5\n")
    with pytest.raises(RunError, match="is damaged"):
        folder.check("config.yaml")


def test_a_file_that_is_replaced_between_two_looks_is_not_called_damaged(folder, monkeypatch):
    folder.write({LAST: b"before"})
    read = run_folder._read_manifest

    def replaced_meanwhile(path):
        known = read(path)
        monkeypatch.setattr(run_folder, "_read_manifest", read)
        folder.write({LAST: b"after"})
        return known

    monkeypatch.setattr(run_folder, "_read_manifest", replaced_meanwhile)
    assert folder.check(LAST).exists()


@pytest.mark.parametrize("name", [".lock", ".lock.txt", ".lock.txt.part", "config.yaml.part"])
def test_what_a_kill_leaves_before_the_settings_is_nothing(folder, name):
    (folder / name).write_text("")
    assert folder.is_empty()


def test_a_start_that_was_cut_short_leaves_an_empty_folder(folder, monkeypatch):
    with dying(monkeypatch, "config.yaml"), pytest.raises(KeyboardInterrupt):
        folder.start({"seed": 0})
    assert os.listdir(folder.path) == [MANIFEST]
    assert folder.is_empty()
    folder.start({"seed": 1})
    assert folder.read_config() == {"seed": 1}
    assert not folder.is_empty()


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "!!python/object/apply:os.mkdir [bomb]"])
def test_settings_that_cannot_be_read(folder, text):
    folder.write({"config.yaml": text.encode()})
    with pytest.raises(RunError, match=r"config\.yaml"):
        folder.read_config()


def test_clear_deletes_a_run_and_nothing_else(folder):
    folder.start({"seed": 0})
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events").write_text("x")
    (folder / "last.ckpt.part").write_text("x")
    folder.clear()
    assert folder.is_empty()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        folder.clear()
    assert (folder / "notes.txt").exists()


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("bomb",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "damaged"),
        (dump_checkpoint({"model": _Bomb()}), "damaged"),
        (dump_checkpoint({"format": 2}), "has format 2; this version reads 1"),
    ],
)
def test_other_checkpoints_are_refused_and_nothing_is_unpickled(
    folder, content, message, monkeypatch
):
    monkeypatch.chdir(folder.path)
    folder.write({CHECKPOINT: content})
    with pytest.raises(RunError, match=message):
        load_checkpoint(folder)
    assert not (folder / "bomb").exists()


def test_weights_come_back_and_others_are_refused(folder):
    model = torch.nn.Conv2d(3, 4, 3)
    folder.write({LAST: dump_weights(model.to(memory_format=torch.channels_last))})
    copy = torch.nn.Conv2d(3, 4, 3)
    load_weights(folder / LAST, copy)
    assert torch.equal(copy.weight, model.weight)
    with pytest.raises(RunError, match="does not fit the model"):
        load_weights(folder / LAST, torch.nn.Conv2d(3, 5, 3))


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "dome"}', '{"statu3": "done"}', "\xff"])
def test_a_damaged_status_is_named(folder, content):
    assert folder.status() == "running"  # there is no file yet
    (folder / "status.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"status\.json is damaged; delete it"):
        folder.status()


# What a run writes, where the disk is full: an error of ours, and what was there before stays.


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
