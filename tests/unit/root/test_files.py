"""Files appear whole or not at all; lines of JSON are read or named."""

import os
import stat
import subprocess
import sys

import pytest

from selectconv.errors import AllocationError, CompressionError, DataError, RunError
from selectconv.extras import import_extra, needing
from selectconv.files import cache_folder, read_json_lines, replacing, write_text, write_whole
from selectconv.lab.data import load_dataset
from selectconv.lab.data.read.image_file import open_image
from selectconv.lab.report.figure import drawing


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    yield path
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]  # nothing is left beside it


@pytest.mark.parametrize("shared", [False, True])
def test_the_new_file_replaces_the_old_one_at_the_end(file, shared):
    mask = os.umask(0o022)
    try:
        with replacing(file, shared=shared) as beside:
            beside.write_text("new")
            assert file.read_text() == "old"
            assert beside.parent == file.parent
    finally:
        os.umask(mask)
    assert file.read_text() == "new"
    assert os.name == "nt" or stat.S_IMODE(file.stat().st_mode) == 0o644  # as the umask says


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(file, shared, error):
    with pytest.raises(error), replacing(file, shared=shared) as beside:  # noqa: PT012
        beside.write_text("half")
        raise error
    assert file.read_text() == "old"


def test_what_a_killed_process_left_is_overwritten(file):
    file.with_name("file.part").write_text("a longer text that was not finished")
    write_text(file, "±\n")
    assert file.read_bytes() == b"\xc2\xb1\n"


def test_two_writers_of_a_shared_file_do_not_meet(file):
    with replacing(file, shared=True) as first, replacing(file, shared=True) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first"  # the outer block ends last


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_error_names_the_file_and_has_the_class_that_was_asked_for(
    file, monkeypatch, step, shared
):
    def fill_disk(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fill_disk)
    message = "cannot be written: No space left on device"
    with pytest.raises(RunError, match=f"file {message}; what it held before is kept"):
        write_whole(file, b"x", shared=shared)
    with pytest.raises(CompressionError, match=rf"other {message}\.$"):
        write_whole(file.with_name("other"), b"x", error=CompressionError, shared=shared)
    assert file.read_text() == "old"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no/file cannot be written: No such file or directory\.$"):
        write_text(tmp_path / "no" / "file", "text")


def test_lines_are_read_without_an_unfinished_one(file):
    file.write_text('{"epoch": 0}\n[1]\n{"epo')
    assert read_json_lines(file) == [{"epoch": 0}, [1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "file cannot be read: No such file"),
        (b"1\nnonsense\n", "file, line 2, is not JSON: "),
        (b"\xff\n", "file cannot be read: 'utf-8' codec"),
    ],
)
def test_what_is_not_lines_of_json_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(AllocationError, match=message):
        read_json_lines(tmp_path / "file", error=AllocationError)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "selectconv"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "selectconv"


# An optional package that is missing is named, with the line that installs it.


@pytest.mark.parametrize(
    ("module", "call", "package", "error"),
    [
        ("sklearn.datasets", lambda: load_dataset("digits"), "scikit-learn", DataError),
        ("PIL.Image", lambda: open_image("x.jpeg"), "Pillow", DataError),
        ("matplotlib", lambda: drawing("figure").__enter__(), "matplotlib", RunError),
    ],
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch, module, call, package, error):
    monkeypatch.setitem(sys.modules, module, None)  # what an import then finds
    with pytest.raises(error, match=rf"needs {package}: pip install 'selectconv\[train\]'\.$"):
        call()


def test_what_is_there_is_imported_and_what_is_not_is_named():
    assert import_extra("json", "This test").dumps([1]) == "[1]"
    with pytest.raises(ValueError, match=r"^This needs no_such: pip install no-such\.$"):
        import_extra("no_such.part", "This", "no-such", error=ValueError)
    with pytest.raises(RuntimeError, match=r"^of another kind$"), needing("json", "This"):
        raise RuntimeError("of another kind")


def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    message = "This needs broken_package, which cannot be imported: No module named 'what_it_needs'"
    with pytest.raises(DataError, match=message):
        import_extra("broken_package", "This", error=DataError)


def test_importing_the_data_sets_imports_none_of_the_extras():
    code = (
        "import sys, selectconv.lab.data;"
        "print(sorted({'PIL', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
