"""Who may import whom, how large a room may be, and that importing the package changes nothing."""

import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "selectconv"


@dataclass(frozen=True)
class Room:
    """A folder of `src/selectconv`, or of its `lab/`; "root": the files beside the rooms.

    Attributes:
        floor: a room may import from its own floor and those above it, never from one below.
        statements: the most that it may have. Who needs more says why in the commit.
        doors: the most modules of it that other rooms import.
    """

    floor: int
    statements: int
    doors: int


# The wall stands between the library (up to `integrations`) and the laboratory, `lab/`.
ROOMS = {
    "root": Room(0, 228, 5),
    "core": Room(1, 1585, 12),
    "graph": Room(2, 1287, 6),
    "deploy": Room(3, 977, 5),
    "allocate": Room(4, 1356, 4),
    "integrations": Room(5, 170, 0),
    "zoo": Room(6, 399, 5),
    "data": Room(6, 769, 4),
    "train": Room(7, 1063, 7),
    "bench": Room(8, 231, 2),
    "reproduce": Room(8, 239, 2),
    "report": Room(9, 923, 2),
    "cli": Room(10, 739, 0),
}
MOST_STATEMENTS, MOST_FUNCTIONS = 9_966, 906
MOST_IN_TESTS = 12_000
# soak/, benchmarks/, results/, examples/ and docs/: no place to hide statements.
MOST_BESIDE = 2955
MOST_LINES, LONGEST_FUNCTION = 400, 50  # of a file; of a function, without its docstring
# The most modules that tests import directly.
MOST_FOR_TESTS = 76
LONG_FUNCTIONS = {
    "allocate/allocator.py:__init__",  # one line per setting
    "core/kernels/triton_select.py:_kernels",  # kernels are compiled where they are defined
    "graph/convert.py:convert",  # one step after the other
}
LAB = SOURCE / "lab"
# Faces re-export and may import anything.
FACES = {"__init__", "__main__", "functional"}
# Rooms of one floor do not know each other; nor do the formulas, which `select_conv` joins.
APART_FILES = {"core/shift.py", "core/ecdm.py", "core/allocation.py"}
MOST_IN_ROOT = 10
DEPENDENCIES = {"torch", "numpy", "safetensors"}
CORE = ROOMS["allocate"].floor  # up to here: torch, numpy, safetensors and nothing else
# What torch itself imports, if it is there.
OF_TORCH = {
    "torchgen", "functorch", "typing_extensions", "filelock", "fsspec", "jinja2", "markupsafe",
    "networkx", "sympy", "mpmath", "setuptools", "pkg_resources", "_distutils_hack", "triton",
    "nvidia", "cuda", "gmpy2", "flint", "ml_dtypes", "intel_openmp", "mkl",
}  # fmt: skip
ALLOWED = sorted(DEPENDENCIES | OF_TORCH | {"selectconv", "__main__", "__mp_main__"})
HEAVY = (
    "safetensors",
    "torchvision",
    "matplotlib",
    "lightning",
    "pytorch_lightning",
    "PIL",
    "scipy",
    "onnx",
)


def room_of(path):
    """Return a file's room: `zoo/densenet.py` -> `zoo`, `errors.py` -> `root`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if len(parts) == 1:
        return parts[0] if parts[0] in FACES else "root"
    return parts[1] if parts[0] == "lab" else parts[0]


def imported(path):
    """Yield the dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # `from a import b` is the file a/b.py where there is one, else a name in a.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if find_file(inner) else node.module


def find_file(name):
    """Return the file of a dotted name of ours, or None."""
    top, _, rest = name.partition(".")
    if top != "selectconv":
        return None
    base = SOURCE.joinpath(*rest.split(".")) if rest else SOURCE
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


def own_imports(path):
    """Return the files of ours that a file imports."""
    return {file for name in imported(path) if (file := find_file(name)) and file != path}


FILES = sorted(set(SOURCE.rglob("*.py")) - {LAB / "__init__.py"})
ROOM_FILES = [path for path in FILES if room_of(path) not in FACES]


def test_every_folder_is_a_room_and_the_root_is_small():
    assert {room_of(path) for path in FILES} == set(ROOMS) | FACES
    assert len([path for path in FILES if path.parent == SOURCE]) <= MOST_IN_ROOT


@pytest.mark.parametrize("path", ROOM_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_same_room_or_one_above(path):
    room = room_of(path)
    for other in own_imports(path):
        theirs = room_of(other)
        if other == SOURCE / "__init__.py":
            continue  # the package itself, for its version
        assert theirs not in FACES, f"{path.name} imports the face {other.name}"
        is_above = ROOMS[theirs].floor < ROOMS[room].floor
        assert room == theirs or is_above, f"{room} imports {theirs}: {other.name}"


def test_the_formulas_do_not_know_each_other():
    for name in APART_FILES:
        others = {str(file.relative_to(SOURCE)) for file in own_imports(SOURCE / name)}
        assert not others & APART_FILES, name


def test_no_file_imports_itself_through_others():
    graph = {path: own_imports(path) - {SOURCE / "__init__.py"} for path in ROOM_FILES}
    order = TopologicalSorter(graph).static_order()  # CycleError names the files
    assert set(order) >= set(graph)


def test_readers_of_data_know_images_and_a_progress_bar_only():
    data = LAB / "data"
    known = {data / "image_set.py", data / "progress.py"}
    for path in (*known, *(data / "read").iterdir()):
        allowed = known | set((data / "read").iterdir()) if path.parent.name == "read" else set()
        others = {file for file in own_imports(path) if file.is_relative_to(data)}
        assert others <= allowed, path.name


@pytest.mark.parametrize(
    "path",
    [path for path in ROOM_FILES if ROOMS[room_of(path)].floor <= CORE],
    ids=lambda path: path.name,
)
def test_the_core_imports_its_dependencies_only(path):
    tops = {name.partition(".")[0] for name in imported(path)}
    assert tops <= DEPENDENCIES | {"selectconv"} | sys.stdlib_module_names


def count(path, kinds):
    """Count the nodes of some kinds in a file: statements, for instance."""
    return sum(isinstance(node, kinds) for node in ast.walk(ast.parse(path.read_text("utf-8"))))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_rooms_keep_to_their_budgets():
    sizes = Counter()
    for path in FILES:
        room = room_of(path)
        sizes["root" if room in FACES else room] += count(path, ast.stmt)
    assert {room: n for room, n in sizes.items() if n > ROOMS[room].statements} == {}
    assert sizes.total() <= MOST_STATEMENTS
    assert sum(count(path, FUNCTIONS) for path in FILES) <= MOST_FUNCTIONS


@pytest.mark.parametrize(
    ("folders", "most"),
    [
        (["tests"], MOST_IN_TESTS),
        (["soak", "benchmarks", "results", "examples", "docs"], MOST_BESIDE),
    ],
    ids=["tests", "beside"],
)
def test_what_stands_beside_the_package_keeps_to_its_budget(folders, most):
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert sum(count(path, ast.stmt) for path in files) <= most


def test_rooms_are_entered_through_few_modules():
    entered = defaultdict(set)
    for path in ROOM_FILES:
        for other in own_imports(path):
            if room_of(other) not in {room_of(path), *FACES}:
                entered[room_of(other)].add(other.stem)
    assert {room: doors for room, doors in entered.items() if len(doors) > ROOMS[room].doors} == {}
    by_tests = {file for path in (ROOT / "tests").rglob("*.py") for file in own_imports(path)}
    assert len(by_tests) <= MOST_FOR_TESTS


def num_lines(function):
    """Count the lines of a function, without its docstring."""
    doc = function.body[0] if ast.get_docstring(function) else None
    shown = 0 if doc is None else doc.end_lineno - doc.lineno + 1
    return function.end_lineno - function.lineno + 1 - shown


def test_files_and_functions_are_short():
    long = set()
    for path in FILES:
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text("utf-8")
        assert text.count("\n") <= MOST_LINES, name
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
        long |= {f"{name}:{f.name}" for f in functions if num_lines(f) > LONGEST_FUNCTION}
    assert long <= LONG_FUNCTIONS


def run(script):
    """Run a script in a fresh process and return what it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BLOCKER = f"""
import json, sys
class Blocker:
    allowed = {ALLOWED!r}
    blocked = set()
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in self.allowed or top in sys.stdlib_module_names:
            return None
        self.blocked.add(top)
        raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_imports_with_everything_else_blocked():
    core = [path for path in ROOM_FILES if ROOMS[room_of(path)].floor <= CORE]
    names = [path.relative_to(SOURCE).with_suffix("").parts for path in core]
    modules = sorted(".".join(("selectconv", *parts)).removesuffix(".__init__") for parts in names)
    script = f"""{BLOCKER}
import importlib
import selectconv
for name in selectconv.__all__:  # each is imported when it is first used
    getattr(selectconv, name)
for name in {modules!r}:
    importlib.import_module(name)
try:
    import hypothesis
except ModuleNotFoundError as error:
    print(json.dumps(str(error)))
"""
    assert run(script) == "hypothesis is blocked"


def test_importing_changes_nothing():
    script = f"""
import json, logging, os, random, sys, warnings
import numpy, torch

def state():
    names = sorted(logging.root.manager.loggerDict)
    loggers = [logging.root, *map(logging.getLogger, names)]
    return {{
        "random numbers of torch": torch.get_rng_state().tolist(),
        "random numbers of python": repr(random.getstate()),
        "random numbers of numpy": repr(numpy.random.get_state()),
        "environment": dict(os.environ),
        "log handlers": {{log.name: len(log.handlers) for log in loggers if log.handlers}},
        "log level": logging.root.level,
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warning filters": repr(warnings.filters),
        "CUDA": torch.cuda.is_initialized(),
    }}

before, modules = state(), set(sys.modules)
import selectconv
for name in selectconv.__all__:
    getattr(selectconv, name)
after = state()
new = {{name.partition(".")[0] for name in set(sys.modules) - modules}}
print(json.dumps({{
    "changed": [key for key in before if before[key] != after[key]],
    "new": sorted(new - set(sys.stdlib_module_names)),
    "heavy": [name for name in {HEAVY!r} if name in sys.modules],
}}))
"""
    found = run(script)
    assert found["changed"] == []
    assert found["heavy"] == []
    assert set(found["new"]) <= set(ALLOWED)
    assert "selectconv" in found["new"]


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["tran"], ["train", "--help"], ["train", "--sed", "1"]]
)
def test_answers_that_need_no_network_do_not_import_torch(words):
    script = f"""
import contextlib, io, json, sys
from selectconv.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.suppress(SystemExit):
        main({words!r})
print(json.dumps(sorted({{"torch", "numpy", "selectconv.core"}} & set(sys.modules))))
"""
    assert run(script) == []


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_command_itself_imports_nothing_but_the_standard_library(word):
    script = f"""{BLOCKER.replace(repr(ALLOWED), repr(["selectconv"]))}
import contextlib, io
from selectconv.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    main([{word!r}])
print(json.dumps("selectconv" in said.getvalue()))
"""
    assert run(script) is True
