"""Files appear whole or not at all; lines of JSON are read or named."""

import os
import stat

import pytest

from selectconv.errors import AllocationError, CompressionError, RunError
from selectconv.files import cache_folder, read_json_lines, replacing, write_text, write_whole


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def fill_disk(*arguments):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("shared", [False, True])
def test_the_new_file_replaces_the_old_one_at_the_end(tmp_path, shared):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, shared=shared) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
        assert beside.parent == tmp_path
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path, shared, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with replacing(path, shared=shared) as beside:
            beside.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / "file.part").write_text("a longer text that was not finished")
    write_text(tmp_path / "file", "whole")
    assert (tmp_path / "file").read_text() == "whole"
    assert names(tmp_path) == ["file"]


def test_two_writers_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the outer block ends last
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_error_names_the_file_and_has_the_class_that_was_asked_for(
    tmp_path, monkeypatch, step, shared
):
    path = tmp_path / "file"
    monkeypatch.setattr(os, step, fill_disk)
    message = "file cannot be written: No space left on device"
    with pytest.raises(CompressionError, match=rf"{message}\.$"):
        write_whole(path, b"x", error=CompressionError, shared=shared)
    assert names(tmp_path) == []
    path.write_text("old")
    with pytest.raises(RunError, match=f"{message}; what it held before is kept"):
        write_whole(path, b"x", shared=shared)
    assert (names(tmp_path), path.read_text()) == (["file"], "old")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no/file cannot be written: No such file or directory\.$"):
        write_text(tmp_path / "no" / "file", "text")


@pytest.mark.skipif(os.name == "nt", reason="has no such permissions")
@pytest.mark.parametrize("shared", [False, True])
def test_others_may_read_what_the_umask_lets_them(tmp_path, shared):
    mask = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", b"x", shared=shared)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_text_is_utf_8(tmp_path):
    write_text(tmp_path / "file", "±\n")
    assert (tmp_path / "file").read_bytes() == b"\xc2\xb1\n"


def test_lines_are_read_without_an_unfinished_one(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0}\n[1]\n{"epo')
    assert read_json_lines(path) == [{"epoch": 0}, [1]]


def test_a_line_that_is_not_json_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "log.jsonl"
    with pytest.raises(AllocationError, match=r"log\.jsonl cannot be read: No such file"):
        read_json_lines(path, error=AllocationError)
    path.write_text("1\nnonsense\n")
    with pytest.raises(RunError, match=r"log\.jsonl, line 2, is not JSON: "):
        read_json_lines(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(RunError, match=r"log\.jsonl cannot be read: 'utf-8' codec"):
        read_json_lines(path)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "selectconv"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "selectconv"
