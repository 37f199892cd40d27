"""What is missing is named."""

import subprocess
import sys

import pytest

from selectconv.bench import data as bench
from selectconv.data import load_dataset
from selectconv.data.extras import import_extra
from selectconv.data.read.jpeg import open_rgb
from selectconv.errors import DataError


@pytest.mark.parametrize(
    ("module", "call", "package"),
    [
        ("sklearn.datasets", lambda: load_dataset("digits"), "scikit-learn"),
        ("PIL.Image", lambda: open_rgb("x.jpeg"), "Pillow"),
        ("PIL.Image", lambda: bench.bench_data(num_images=256, repeats=1), "Pillow"),
    ],
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch, module, call, package):
    monkeypatch.setitem(sys.modules, module, None)  # what an import then finds
    with pytest.raises(DataError, match=rf"needs {package}: install selectconv\[train\]\.$"):
        call()


def test_what_is_there_is_imported():
    assert import_extra("json", "This test").dumps([1]) == "[1]"


def test_importing_the_data_sets_imports_none_of_the_extras():
    code = (
        "import sys, selectconv.data.registry, selectconv.data.serve.loader;"
        "print(sorted({'PIL', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
