"""An optional package that is missing is named, with the line that installs it."""

import subprocess
import sys

import pytest

from selectconv.errors import DataError, RunError
from selectconv.extras import import_extra, needing
from selectconv.lab.data import load_dataset
from selectconv.lab.data.read.image_file import open_image
from selectconv.lab.report.figure import drawing


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
