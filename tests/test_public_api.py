"""The public names, their documentation and the command."""

import inspect
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import selectconv as sc

PUBLIC = {
    "AllocationError", "AllocationPlan", "AllocationReport", "BatchNormMean", "ChannelAllocator",
    "ConcatMean", "ConstantMean", "ConversionError", "MeanSourceError", "ObservedMean",
    "SelectConv1d", "SelectConv2d", "SelectConv3d", "SelectConvError", "SelectConvWarning",
    "__version__", "convert", "create_model", "describe", "functional", "list_models",
    "observe_damage", "param_groups",
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
        (sc.AllocationError, ValueError),
        (sc.MeanSourceError, RuntimeError),
    ],
)
def test_errors_are_also_builtins(error, builtin):
    assert issubclass(error, sc.SelectConvError)
    assert issubclass(error, builtin)
    assert not issubclass(sc.SelectConvError, builtin)


def test_version_is_that_of_the_project():
    project = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert sc.__version__ == project["project"]["version"]


def command(kind):
    if kind == "module":
        return [sys.executable, "-m", "selectconv"]
    script = shutil.which("selectconv", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the `selectconv` command is not installed beside this interpreter")
    return [script]


@pytest.mark.parametrize("kind", ["module", "script"])
def test_command_prints_its_version(kind):
    done = subprocess.run(
        [*command(kind), "--version"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"selectconv {sc.__version__}")


def test_command_refuses_unknown_arguments():
    done = subprocess.run(
        [*command("module"), "--nonsense"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr
