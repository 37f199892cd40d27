"""The public names, their documentation and the command."""

import ast
import inspect
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import selectconv as sc

PUBLIC = {
    "AllocationError", "AllocationPlan", "AllocationReport", "BatchNormMean", "ChannelAllocator",
    "CompressionError", "ConcatMean", "ConstantMean", "ConversionError", "Cost", "CostCounter",
    "ExportError", "MeanSourceError", "ObservedMean", "SelectConv1d", "SelectConv2d",
    "SelectConv3d", "SelectConvError", "SelectConvWarning", "SelectedMean", "__version__",
    "compress", "convert", "count", "create_model", "describe", "export_onnx", "functional",
    "list_models", "load_compressed", "observe_damage", "param_groups", "save_compressed",
}  # fmt: skip
FUNCTIONAL = {
    "choose_dealloc", "ecdm", "expected_activation", "expected_relu", "normalize_ecdm",
    "realloc_scores", "rms_damage", "select_channels", "shift2d",
}  # fmt: skip
NEEDS_EXAMPLE = [
    *(f"functional.{name}" for name in sorted(FUNCTIONAL)),
    *(
        name
        for name in sorted(PUBLIC - {"functional", "__version__"})
        if not (isinstance(getattr(sc, name), type) and issubclass(getattr(sc, name), Exception))
    ),
]


def resolve(name):
    where, _, last = name.rpartition(".")
    return getattr(getattr(sc, where) if where else sc, last)


def test_public_names():
    assert set(sc.__all__) == PUBLIC
    assert len(sc.__all__) == len(PUBLIC)
    assert all(hasattr(sc, name) for name in PUBLIC)


def test_names_are_imported_on_first_use_and_listed_before():
    script = """
import json, sys
import selectconv as sc
before = sorted(sc.__all__) == sorted(set(dir(sc)) & set(sc.__all__))
light = "torch" not in sys.modules
from selectconv import convert, functional
same = sc.convert is convert and sc.functional is functional and "convert" in vars(sc)
print(json.dumps([before, light, same, sc.convert.__module__]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert json.loads(done.stdout) == [True, True, True, "selectconv.graph.convert"]


def test_every_name_has_one_home():
    assert set(sc._HOMES) == PUBLIC - {"functional", "__version__"}
    source = ast.parse(Path(sc.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    seen_by_type_checkers = {
        alias.name: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("selectconv.")
        for alias in node.names
    }
    assert seen_by_type_checkers == sc._HOMES
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        sc.convrt  # noqa: B018 - asking is the test


def test_names_of_functional():
    assert set(sc.functional.__all__) == FUNCTIONAL
    assert all(callable(getattr(sc.functional, name)) for name in FUNCTIONAL)
    public = {
        name
        for name, value in vars(sc.functional).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == FUNCTIONAL


@pytest.mark.parametrize("name", NEEDS_EXAMPLE)
def test_documented_with_an_example(name):
    summary, _, rest = inspect.cleandoc(resolve(name).__doc__).partition("\n")
    assert summary.endswith((".", ":"))
    assert "Example:" in rest
    assert ">>> " in rest


@pytest.mark.parametrize("name", sorted(PUBLIC - set(NEEDS_EXAMPLE) - {"__version__"}))
def test_documented(name):
    assert getattr(sc, name).__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (sc.ConversionError, ValueError),
        (sc.CompressionError, ValueError),
        (sc.ExportError, RuntimeError),
        (sc.AllocationError, ValueError),
        (sc.MeanSourceError, RuntimeError),
    ],
)
def test_errors_are_also_builtins(error, builtin):
    assert issubclass(error, sc.SelectConvError)
    assert issubclass(error, builtin)
    assert not issubclass(sc.SelectConvError, builtin)


def run_command(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("kind", ["module", "script"])
def test_command_prints_its_version(kind):
    script = shutil.which("selectconv", path=str(Path(sys.executable).parent))
    if kind == "script" and script is None:
        pytest.skip("the `selectconv` command is not installed beside this interpreter")
    command = [script] if kind == "script" else [sys.executable, "-m", "selectconv"]
    done = run_command(*command, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"selectconv {sc.__version__}")


def test_command_refuses_unknown_arguments():
    done = run_command(sys.executable, "-m", "selectconv", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_required_is_what_has_been_run():
    """`make compat` writes the rows of docs/versions.md."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *itertools.chain(*extras)]
    lowest = dict(re.findall(r"(?m)^([\w-]+)>=([\d.]+)$", "\n".join(needed)))
    oldest = dict(
        re.findall(r"(?m)^([\w-]+)==([\d.]+)$", (root / "constraints-oldest.txt").read_text())
    )
    for name, version in oldest.items():
        assert f"{version}.".startswith(f"{lowest[name]}."), name
    page = (root / "docs" / "versions.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \w+", line)
    ]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert {row[1].rpartition(".")[0] for row in rows[1:]} == set(pythons)
    torches = sorted(tuple(map(int, row[2].split("+")[0].split("."))) for row in rows[1:])
    assert torches[0][:2] == tuple(map(int, lowest["torch"].split(".")))
