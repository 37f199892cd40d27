"""An optional package that is missing is named, with the line that installs it."""

import subprocess
import sys

import pytest

from selectconv.errors import DataError, RunError
from selectconv.extras import import_extra, needing
from selectconv.lab.bench import data as bench
from selectconv.lab.data import load_dataset
from selectconv.lab.data.read.image_file import open_image
from selectconv.lab.report.figures.plots import drawing


def draw():
    with drawing():
        pass


@pytest.mark.parametrize(
    ("module", "call", "package", "error"),
    [
        ("sklearn.datasets", lambda: load_dataset("digits"), "scikit-learn", DataError),
        ("PIL.Image", lambda: open_image("x.jpeg"), "Pillow", DataError),
        ("PIL.Image", lambda: bench.bench_data(num_images=256, repeats=1), "Pillow", DataError),
        ("matplotlib", draw, "matplotlib", RunError),
    ],
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch, module, call, package, error):
    monkeypatch.setitem(sys.modules, module, None)  # what an import then finds
    with pytest.raises(error, match=rf"needs {package}: pip install 'selectconv\[train\]'\.$"):
        call()


def test_what_is_there_is_imported():
    assert import_extra("json", "This test").dumps([1]) == "[1]"


def test_a_package_outside_the_extras_is_installed_by_its_own_name():
    with pytest.raises(ValueError, match=r"^This needs no_such: pip install no-such\.$"):
        import_extra("no_such.part", "This", "no-such", error=ValueError)


def test_a_module_error_carries_the_name_of_the_package():
    with pytest.raises(ModuleNotFoundError, match="This needs no_such") as caught:
        import_extra("no_such.part", "This")
    assert caught.value.name == "no_such"


def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    message = "This needs broken_package, which cannot be imported: No module named 'what_it_needs'"
    with pytest.raises(DataError, match=message):
        import_extra("broken_package", "This", error=DataError)
    # Among import errors its own is the clearest.
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'what_it_needs'$"):
        import_extra("broken_package", "This")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match=r"^of another kind$"), needing("json", "This"):
        raise RuntimeError("of another kind")


def test_importing_the_data_sets_imports_none_of_the_extras():
    code = (
        "import sys, selectconv.lab.data.registry, selectconv.lab.data.serve.loader;"
        "print(sorted({'PIL', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
