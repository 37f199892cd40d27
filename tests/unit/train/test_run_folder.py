"""A run's folder: whole files, honest readers."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from selectconv.errors import RunError, UsageError
from selectconv.files import write_text
from selectconv.lab.train import digests
from selectconv.lab.train.checkpoint import (
    has_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)
from selectconv.lab.train.digests import check_recorded, write_recorded
from selectconv.lab.train.run_folder import ALLOCATION, METRICS, RunFolder, describe_environment

STATE = {"epoch": 3, "model": {}, "optimizer": {}, "allocator": None, "best_error": 1.5}


def test_a_write_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "before")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device; what it held before is kept"):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_append_that_fails_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.append(METRICS, {"epoch": 0})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(digests, "record", lambda path, known: None)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="cannot append"):
        folder.append(METRICS, {"epoch": 1})
    assert (tmp_path / METRICS).read_text() == '{"epoch": 0}\n'


def test_half_a_line_does_not_count_and_is_cut(tmp_path):
    folder = RunFolder(tmp_path)
    for epoch in range(3):
        folder.append(METRICS, {"epoch": epoch, "loss": 0.1})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"epoch": 3, "lo')
    assert [row["epoch"] for row in folder.read(METRICS)] == [0, 1, 2]
    folder.cut_after(1)
    assert (tmp_path / METRICS).read_text().count("\n") == 2
    folder.append(METRICS, {"epoch": 2, "loss": 0.2})
    assert [row["epoch"] for row in folder.read(METRICS)] == [0, 1, 2]


@pytest.mark.parametrize("name", [METRICS, ALLOCATION])
def test_lines_that_were_changed_or_deleted_are_refused(tmp_path, name):
    folder = RunFolder(tmp_path)
    for epoch in range(3):
        folder.append(name, {"epoch": epoch, "loss": 0.25})
    folder.cut_after(1)
    whole = (folder / name).read_bytes()
    for damaged in (whole.replace(b"0.25", b"0.24", 1), whole[: whole.index(b"\n") + 1], b""):
        (folder / name).write_bytes(damaged)
        with pytest.raises(RunError, match=f"{name} is damaged: .* restore it, or train again"):
            folder.read(name)
    (folder / name).unlink()
    with pytest.raises(RunError, match="is damaged"):
        folder.cut_after(1)


def test_a_first_line_that_was_announced_but_not_written_does_not_count(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)

    path_open = Path.open

    def open_or_die(path, mode, *arguments, **options):
        if mode == "ab":
            raise KeyboardInterrupt
        return path_open(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_or_die)
        with pytest.raises(KeyboardInterrupt):
            folder.append(METRICS, {"epoch": 0})
    assert (folder / "digests.json").exists()
    folder.cut_after(-1)
    assert folder.read(METRICS) == []
    folder.append(METRICS, {"epoch": 0})
    assert folder.read(METRICS) == [{"epoch": 0}]


@pytest.mark.parametrize("name", [".lock", ".lock.json", ".lock.json.part", "config.yaml.part"])
def test_what_a_kill_leaves_before_the_settings_is_nothing(tmp_path, name):
    (tmp_path / name).write_text("")
    assert RunFolder(tmp_path).is_empty()


def test_a_start_that_was_cut_short_leaves_an_empty_folder(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    replace = os.replace

    def full(source, target):
        if target == folder / "config.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(RunError, match="No space left"):
            folder.start({"seed": 0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["digests.json"]
    assert folder.is_empty()
    folder.start({"seed": 1})
    assert folder.read_config() == {"seed": 1}
    assert not folder.is_empty()


def test_a_file_that_is_replaced_between_two_looks_is_not_called_damaged(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    digests.write_recorded(path, lambda file: file.write(b"before"))
    look = digests.recorded

    def replaced_meanwhile(one):
        known = look(one)
        monkeypatch.setattr(digests, "recorded", look)
        digests.write_recorded(path, lambda file: file.write(b"after"))
        return known

    monkeypatch.setattr(digests, "recorded", replaced_meanwhile)
    assert digests.is_unchanged(path)
    path.write_bytes(b"damaged")
    assert not digests.is_unchanged(path)


def test_a_run_is_finished_if_its_status_and_its_metrics_say_so(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(METRICS, {"epoch": 0})
    assert not folder.is_finished(1)
    folder.set_status("done")
    assert folder.is_finished(1)
    assert not folder.is_finished(2)  # the status of another run


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / METRICS).write_text('{"epoch": 0}\nnonsense\n')
    with pytest.raises(RunError, match="line 2, is not JSON"):
        RunFolder(tmp_path).read(METRICS)


def test_numbers_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunFolder(tmp_path).append(METRICS, {"epoch": float("nan")})
    assert not (tmp_path / METRICS).exists()


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\0"])
def test_settings_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=r"config\.yaml"):
        RunFolder(tmp_path).read_config()


def test_clear_deletes_a_run_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path / "run")
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


def test_checkpoints_come_back_and_damaged_ones_are_named(tmp_path):
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, STATE)
    assert load_checkpoint(path) == {"format": 1, **STATE}
    (tmp_path / "digests.json").unlink()  # as version 0.1 left a folder: nothing but its format
    torch.save({"format": 2, **STATE}, path)
    with pytest.raises(RunError, match="has format 2; this version reads 1"):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(RunError, match="was not written by selectconv"):
        load_checkpoint(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match=r"last\.ckpt is damaged"):
        load_checkpoint(path)


def test_a_missing_checkpoint_is_not_a_new_start(tmp_path):
    path = tmp_path / "last.ckpt"
    assert not has_checkpoint(path)
    for epoch in range(2):
        save_checkpoint(path, {**STATE, "epoch": epoch})
    assert has_checkpoint(path)
    path.unlink()
    with pytest.raises(
        RunError, match=r"last\.ckpt is missing\. The one before it, of epoch 0, is"
    ):
        has_checkpoint(path)


@pytest.mark.parametrize("bit", range(0, 8 * 400, 37))
def test_one_wrong_bit_in_the_record_is_noticed_or_changes_nothing(tmp_path, bit):
    path, record = tmp_path / "config.yaml", tmp_path / "digests.json"
    write_recorded(path, lambda file: file.write(b"gamma: 0.05\n"))
    content = bytearray(record.read_bytes())
    bit %= 8 * len(content)
    content[bit // 8] ^= 1 << bit % 8
    record.write_bytes(content)
    path.write_text("gamma: 0.5\n")
    with pytest.raises(RunError, match="is damaged"):
        check_recorded(path, "restore it.")


def test_a_checkpoint_is_accepted_however_often_its_successors_are_killed(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {**STATE, "epoch": 0})
    replace = os.replace

    def die(source, target):
        if target == path:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    for epoch in range(1, 6):
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, {**STATE, "epoch": epoch})
        assert load_checkpoint(path)["epoch"] == 0
        assert load_checkpoint(tmp_path / "previous.ckpt")["epoch"] == 0
    monkeypatch.setattr(os, "replace", replace)
    for epoch in (1, 2):
        save_checkpoint(path, {**STATE, "epoch": epoch})
    known = json.loads((tmp_path / "digests.json").read_text())
    assert {name: len(accepted) for name, accepted in known.items()} == {
        "last.ckpt": 1,
        "previous.ckpt": 1,
        "digests.json": 1,
    }


def test_a_checkpoint_that_was_put_back_is_accepted_after_a_kill(tmp_path, monkeypatch):
    path, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    for epoch in range(2):
        save_checkpoint(path, {**STATE, "epoch": epoch})
    os.replace(previous, path)  # as the message about a damaged checkpoint says
    assert load_checkpoint(path)["epoch"] == 0
    replace = os.replace

    def die(source, target):
        if target == path:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {**STATE, "epoch": 1, "best_error": 2.5})
    assert load_checkpoint(path)["epoch"] == 0
    assert load_checkpoint(previous)["epoch"] == 0


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("bomb",))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, **STATE, "model": _Bomb()}, "last.ckpt")
    with pytest.raises(RunError, match="damaged"):
        load_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "bomb").exists()


def test_weights_come_back_and_others_are_refused(tmp_path):
    path = tmp_path / "last.safetensors"
    model = torch.nn.Conv2d(3, 4, 3)
    save_weights(path, model.to(memory_format=torch.channels_last))
    copy = torch.nn.Conv2d(3, 4, 3)
    load_weights(path, copy)
    assert torch.equal(copy.weight, model.weight)
    with pytest.raises(RunError, match="does not fit the model"):
        load_weights(path, torch.nn.Conv2d(3, 5, 3))
    with pytest.raises(RunError, match="has not finished an epoch yet"):
        load_weights(tmp_path / "none.safetensors", copy)
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="damaged"):
        load_weights(path, copy)


def test_the_environment_is_plain_json():
    content = json.loads(json.dumps(describe_environment()))
    assert content["versions"]["torch"] == torch.__version__
    assert content["cores"] >= 1


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "dome"}', '{"statu3": "done"}', "\xff"])
def test_a_damaged_status_is_named(tmp_path, content):
    folder = RunFolder(tmp_path)
    assert folder.status() == "running"  # there is no file yet
    (tmp_path / "status.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"status\.json is damaged; delete it"):
        folder.status()
