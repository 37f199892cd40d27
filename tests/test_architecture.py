"""Who may import whom, and that importing the package changes nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "selectconv"

# A file may import from its own tier or a lower one. New files must be placed here.
TIERS = {
    0: {
        "errors",
        "checks",
        "threads",
        "shift",
        "ecdm",
        "allocation",
        "kernels",  # a folder
        "functional",
        "mean_source",
        "slots",
        "layer",
    },
    1: {
        "agreement",
        "allocation_log",
        "allocation_report",
        "allocator",
        "budget",
        "compress",
        "compressed_file",
        "concat_buffer",
        "convert",
        "cost",
        "damage",
        "dataflow",
        "description",
        "eligibility",
        "example",
        "export",
        "graph",
        "kinds",
        "latency",
        "layout",
        "operations",
        "optimizer_state",
        "param_groups",
        "pointwise",
        "pure_graph",
        "rearrangement",
        "rewiring",
    },
    2: {"zoo", "data", "integrations"},  # whole folders
    3: {"train"},
    4: {"report", "reproduce", "cli", "__init__", "__main__"},
}
TIER_OF = {name: tier for tier, names in TIERS.items() for name in names}
# These do not know of each other: `layer` joins the first three, `train` the last two.
APART = {"shift", "ecdm", "allocation"}, {"zoo", "data"}
DEPENDENCIES = {"torch", "numpy", "safetensors"}
CORE_TIERS = (0, 1)
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


def module_name(path):
    """`zoo/densenet.py` -> `zoo`, `layer.py` -> `layer`: the name in the table."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path):
    """Yield the dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "selectconv":
                yield from (f"selectconv.{alias.name}" for alias in node.names)
            else:
                yield node.module


def own_imports(path):
    """The names in the table that a file imports; what `__init__` itself defines is its own."""
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "selectconv":
            first = rest.partition(".")[0]
            yield (
                first
                if (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").exists()
                else ("__init__")
            )


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_same_tier_or_a_lower_one(path):
    name = module_name(path)
    assert name in TIER_OF, f"place `{name}` in the table of tiers"
    for other in own_imports(path):
        assert other in TIER_OF, f"place `{other}` in the table of tiers"
        assert TIER_OF[other] <= TIER_OF[name], f"{name} (tier {TIER_OF[name]}) imports {other}"
        for apart in APART:
            assert not (name != other and {name, other} <= apart), f"{name} imports {other}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if TIER_OF.get(module_name(path)) in CORE_TIERS],
    ids=lambda path: path.name,
)
def test_the_core_imports_its_dependencies_only(path):
    tops = {name.partition(".")[0] for name in imported(path)}
    assert tops <= DEPENDENCIES | {"selectconv"} | sys.stdlib_module_names


def test_the_table_names_no_file_that_is_gone():
    there = {module_name(path) for path in FILES}
    assert set(TIER_OF) <= there


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
    modules = sorted(f"selectconv.{name}" for tier in CORE_TIERS for name in TIERS[tier])
    script = f"""{BLOCKER}
import importlib
for name in {["selectconv", *modules]!r}:
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
